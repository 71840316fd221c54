"""DDP leaves gradients local of parameters that were thawed, replaced or added after wrapping

Promised: DistributedDataParallel averages gradients. Its documentation says that parameters must
not change after wrapping, so a change is refused, or said.

Happens: nothing is said; the gradients of the new parameters are each rank's own.

Severity: silent wrong data
Taste: perhaps: the documentation warns of it
Upstream: https://github.com/pytorch/pytorch/issues/12603
"""
# deviations: ddp/changed/replaced
# shows: gradient is

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
    module.weight.requires_grad_(False)
    model = DistributedDataParallel(module)
    module.weight.requires_grad_(True)
    model(torch.tensor([[1.0 + 2 * rank]])).sum().backward()
    assert module.weight.grad.item() == 2, f"the gradient is {module.weight.grad.item()}, not 2"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
