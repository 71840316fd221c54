"""all_reduce with AVG overflows where the average is in range

Promised: torch.distributed docs, ReduceOp.AVG averages values across ranks; NCCL divides before
it sums.

Happens: Gloo sums first: the average of 60000 and 60000 in float16 is inf.

Severity: silent wrong data
Taste: perhaps: rounding and range are not promised
Upstream: none found, searched in November 2026
Related: https://github.com/pytorch/pytorch/pull/149781
"""
# deviations: reductions/average-in-range
# shows: x is \[inf\]

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    x = torch.tensor([60000.0], dtype=torch.float16)
    dist.all_reduce(x, dist.ReduceOp.AVG)
    assert x.tolist() == [60000], f"x is {x.tolist()}"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
