"""wait(timeout) of a reduce_scatter ignores the timeout

Promised: torch.distributed docs, Work.wait(timeout): raises when the timeout has passed.

Happens: it waits for the group's timeout, half an hour by default (here 12 s).

Severity: hang
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: reduce_scatter/wait-timeout
# shows: after 1[0-9] s

import signal
import tempfile
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=12), 2, rank)
    if rank == 0:
        start = time.monotonic()
        work = dist.reduce_scatter(torch.zeros(1), [torch.ones(1)] * 2, async_op=True)
        try:
            work.wait(timedelta(seconds=1))
        except RuntimeError:
            pass
        took_s = time.monotonic() - start
        assert took_s < 8, f"wait(1 s) came back after {took_s:.0f} s"
    else:
        time.sleep(14)


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
