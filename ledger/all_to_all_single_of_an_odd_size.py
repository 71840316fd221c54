"""all_to_all_single without split sizes tears elements apart if the size is not divisible

Promised: torch.distributed docs, all_to_all_single: without split sizes "dim 0 of output and
input tensor must divide equally by world_size".

Happens: Gloo divides the bytes: half an element goes to the other rank, without a word.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
Related: https://github.com/pytorch/pytorch/issues/101380
"""
# deviations: arguments/even-splits
# shows: y is

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    x, y = torch.arange(5.0) + 1.1, torch.zeros(5)
    try:
        dist.all_to_all_single(y, x)
    except (ValueError, RuntimeError):
        pass  # refused
    else:
        raise AssertionError(f"y is {y.tolist()}")


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
