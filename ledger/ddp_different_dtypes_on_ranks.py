"""DDP of modules whose dtypes differ ends a process, or takes garbage

Promised: _verify_param_shape_across_processes: parameters are verified to be the same on all
ranks, or an error is raised.

Happens: sizes and strides alone are compared. The broadcast of parameters that follows is of
messages of different sizes: SIGABRT.

Severity: crash
Taste: no
Upstream: none found, searched in November 2026
Related: https://github.com/pytorch/gloo/pull/456
"""
# deviations: ddp/verify/dtypes
# shows: signal SIGABRT

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
    dtype = [torch.float64, torch.float32][rank]
    try:
        DistributedDataParallel(torch.nn.Linear(2, 2, dtype=dtype))
        dist.barrier()
    except RuntimeError:
        pass


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
