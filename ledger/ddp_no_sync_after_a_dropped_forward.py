"""A backward under no_sync is reduced if an earlier forward had no backward

Promised: torch docs, DistributedDataParallel, no_sync: "A context manager to disable gradient
synchronizations across DDP processes."

Happens: after a forward outside whose output was dropped, the backward inside no_sync is
all-reduced.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: ddp/no-sync/after-a-dropped-forward
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
    model = DistributedDataParallel(module)
    x = torch.tensor([[1.0 + 2 * rank]])
    model(x)
    with model.no_sync():
        model(x).sum().backward()
    grad = module.weight.grad.item()
    assert grad == x.item(), f"the gradient is {grad}, not {x.item()}"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
