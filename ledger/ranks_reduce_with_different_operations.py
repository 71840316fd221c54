"""Ranks that reduce with different operations or dtypes get different results without a word

Promised: an error, as TORCH_DISTRIBUTED_DEBUG=DETAIL gives; at least the same result on all
ranks.

Happens: nothing but bytes is exchanged, so each rank reduces them in its own way.

Severity: silent wrong data
Taste: perhaps: the documentation makes agreement the caller's duty, and DETAIL checks it
Upstream: none found, searched in November 2026
Related: https://github.com/pytorch/pytorch/issues/22071
"""
# deviations: mismatch/dtype
# shows: no error; x is

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    x = torch.full((4,), 3.0)
    try:
        dist.all_reduce(x, dist.ReduceOp.SUM if rank == 0 else dist.ReduceOp.PRODUCT)
    except RuntimeError:
        pass
    else:
        raise AssertionError(f"no error; x is {x.tolist()}")


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
