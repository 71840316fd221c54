"""_set_params_and_buffers_to_ignore_for_model does not ignore parameters of the top module

Promised: DistributedDataParallel._set_params_and_buffers_to_ignore_for_model: names as in
named_parameters().

Happens: names are compared as "module.name", which begins with a dot for the top module's own:
they are not ignored.

Severity: silent wrong data
Taste: perhaps: the function is private, though error messages and other projects name it
Upstream: none found, searched in November 2026
"""
# deviations: ddp/buffers/ignored-at-the-top
# shows: it was not ignored

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    module = torch.nn.Linear(1, 1)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["bias"])
    model = DistributedDataParallel(module)
    scale = 1.0 + 2 * rank
    (scale * model(torch.ones(1, 1))).sum().backward()
    got = module.bias.grad.item()
    assert got == scale, f"it was not ignored: its gradient is {got}, not {scale}"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
