"""Two forwards through DDP before a backward fail if there are buffers

Promised: what works without DDP: two forwards, then one backward.

Happens: before torch 2.13 the broadcast of the buffers in the second forward counts as a change
in place: RuntimeError in backward.

Severity: wrong error
Taste: no
Upstream: https://github.com/pytorch/pytorch/issues/22095
"""
# deviations: ddp/buffers/versions
# shows: modified by an inplace operation

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
    model = DistributedDataParallel(torch.nn.BatchNorm1d(2))
    model.eval()
    a, b = model(torch.ones(4, 2)), model(torch.ones(4, 2))
    (a + b).sum().backward()


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
