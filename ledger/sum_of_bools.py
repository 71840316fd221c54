"""all_reduce with SUM leaves 2 in a bool tensor

Promised: a torch.bool holds 0 or 1; True + True is True in torch.

Happens: Gloo adds bytes. x holds the byte 2, which is true but not equal to True.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
Related: https://github.com/pytorch/pytorch/pull/41959
"""
# deviations: reductions/bool-bytes
# shows: bytes of x are

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    x = torch.ones(1, dtype=torch.bool)
    dist.all_reduce(x)
    assert x.view(torch.uint8).item() == 1, f"the bytes of x are {x.view(torch.uint8).tolist()}"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
