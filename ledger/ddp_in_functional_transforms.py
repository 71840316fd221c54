"""torch.func.jacrev of a DDP model with buffers raises

Promised: a wrapper computes what its module computes; jacrev of the module works, and of DDP
without buffers too.

Happens: the broadcast of buffers writes inside of the transform, which refuses that.

Severity: wrong error
Taste: no
Upstream: https://github.com/pytorch/pytorch/issues/130932
"""
# deviations: ddp/functional-transforms-with-buffers
# shows: Error

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
    module = torch.nn.BatchNorm1d(2).eval()
    torch.func.jacrev(module)(torch.ones(1, 2))
    torch.func.jacrev(DistributedDataParallel(module))(torch.ones(1, 2))


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
