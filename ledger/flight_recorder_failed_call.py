"""Gloo's flight recorder counts a call that has timed out as completed

Promised: last_completed_collective is the last collective of a group that was completed.

Happens: when a call times out, gloo counts it, and marks it as retired, as if it had succeeded. A
recording that is taken after the timeout, which is when one wants it, shows no call that hangs.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: flight_recorder/failed
# shows: call 1, which timed out, is completed

import contextlib
import pickle
import signal
import tempfile
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch._C import _distributed_c10d as c10d


def run(rank, init_method):
    signal.alarm(60)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=1), 2, rank)
    if rank == 1:
        time.sleep(3)
        return
    with contextlib.suppress(RuntimeError):
        dist.all_reduce(torch.ones(2))
    time.sleep(0.5)
    status = pickle.loads(c10d._dump_fr_trace())["pg_status"]["0"]
    last = status["last_completed_collective"]
    assert last < 1, f"call {last}, which timed out, is completed"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
