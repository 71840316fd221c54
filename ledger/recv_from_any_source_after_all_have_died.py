"""recv without a source does not notice that all ranks that could send have died

Promised: recv from a dead rank raises at once; so should a receive from any rank when all others
are dead.

Happens: it waits for the whole timeout, half an hour by default.

Severity: hang
Taste: no
Upstream: none known
"""
# deviations: peer_loss/from-anybody
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
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    dist.all_reduce(torch.ones(1))
    if rank == 1:
        os._exit(0)
    start = time.monotonic()
    try:
        dist.recv(torch.ones(1))
    except RuntimeError:
        took_s = time.monotonic() - start
        assert took_s < 8, f"recv gave up after {took_s:.0f} s"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
