"""DDP does not average what a second backward through the same graph adds

Promised: loss.backward(retain_graph=True) twice adds the gradients twice; averaged gradients are
what DDP promises after each backward.

Happens: each forward arms the reducer for one backward; what the second one adds stays local,
without a word.

Severity: silent wrong data
Taste: no
Upstream: https://github.com/pytorch/pytorch/issues/47260
"""
# deviations: ddp/backward/several-forwards-then-several-backwards
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
    loss = DistributedDataParallel(module)(torch.tensor([[1.0 + 2 * rank]])).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert module.weight.grad.item() == 4, f"the gradient is {module.weight.grad.item()}, not 4"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
