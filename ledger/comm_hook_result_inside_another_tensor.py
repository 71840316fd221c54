"""DDP reads the result of a communication hook from the beginning of its storage

Promised: torch docs, DDP communication hooks: the future holds a tensor of the bucket's shape,
which may be a view.

Happens: gradients are taken from the beginning of the result's storage, wherever the result
begins in it.

Cause: Reducer::populate_bucket_views_out makes a view of each gradient by as_strided with the
offset in the bucket. That offset counts from the beginning of the storage; the result's own
storage_offset() has to be added to it.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: comm_hooks/result-inside-another-tensor
# shows: gradient is

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel


def hook(_, bucket):
    future = torch.futures.Future()
    future.set_result(torch.cat([torch.full((4,), 7.0), bucket.buffer()])[4:])
    return future


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    module = torch.nn.Linear(1, 1)
    model = DistributedDataParallel(module)
    model.register_comm_hook(None, hook)
    model(torch.ones(1, 1)).sum().backward()
    assert module.weight.grad.item() == 1, f"the gradient is {module.weight.grad.item()}, not 1"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
