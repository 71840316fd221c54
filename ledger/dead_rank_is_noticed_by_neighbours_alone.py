"""A dead rank is noticed by its neighbours alone; other ranks wait for the timeout

Promised: in a group of three, each of the two that remain gets an error soon, as those who talk
to the dead rank do.

Happens: rank 1 goes on in its loop of broadcasts and waits for the whole timeout, half an hour by
default.

Severity: hang
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: peer_loss/every-rank
# shows: after [0-9]+ s

import os
import signal
import tempfile
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 4, rank)
    dist.all_reduce(torch.ones(1))
    if rank == 3:
        time.sleep(1)
        os._exit(0)
    start = time.monotonic()
    try:
        while True:
            dist.broadcast(torch.ones(1 << 16), 0)
    except RuntimeError:
        took_s = time.monotonic() - start
        assert took_s < 8, f"a rank was told after {took_s:.0f} s"
    time.sleep(14)


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 4, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
