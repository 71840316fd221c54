"""FSDP accumulates the gradient of a unit of one element wrongly

Promised: gradients of two backwards add up, as for units of two elements and more.

Happens: a sharded gradient is told from an unsharded one by its size, which is the same here:
what the first backward left goes into the second reduction.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: fsdp/one-element-accumulates
# shows: sum is

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import FullyShardedDataParallel


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    module = torch.nn.Linear(1, 1, bias=False)
    model = FullyShardedDataParallel(module, device_id=torch.device("cpu"))
    for _ in range(2):
        model(torch.ones(1, 1)).sum().backward()
    grad = next(model.parameters()).grad.sum() if rank == 0 else torch.zeros(())
    assert rank == 1 or grad.item() == 2, f"the sum is {grad.item()}, not 2"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
