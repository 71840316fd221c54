"""ProcessGroup.abort() does not end what waits on Gloo

Promised: ProcessGroup.abort: aborts all operations and connections, as on NCCL.

Happens: on Gloo it does nothing: a wait goes on to the timeout, and later operations begin.

Severity: hang
Taste: no
Upstream: https://github.com/pytorch/pytorch/issues/130345
"""
# deviations: abort/*
# shows: after [0-9]+ s

import signal
import tempfile
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    if rank == 1:
        time.sleep(13)
        raise SystemExit
    start = time.monotonic()
    work = dist.all_reduce(torch.ones(1), async_op=True)
    threading.Timer(1, dist.group.WORLD.abort).start()
    try:
        work.wait()
    except RuntimeError:
        took_s = time.monotonic() - start
        assert took_s < 6, f"wait() ended after {took_s:.0f} s"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
