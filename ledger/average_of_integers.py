"""all_reduce with AVG of integers raises after the communication

Promised: torch.distributed docs, ReduceOp.AVG: no dtypes are named; NCCL averages integers and
truncates.

Happens: RuntimeError of div_: the result type Float cannot be cast to Int. The tensor holds the
sum by then.

Severity: wrong error
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: reductions/average-of-integers
# shows: can't be cast

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    x = torch.full((2,), 4, dtype=torch.int32)
    dist.all_reduce(x, dist.ReduceOp.AVG)
    assert x.tolist() == [4, 4], f"x is {x.tolist()}"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
