"""The Work of a failed reduce_scatter says is_success() == True

Promised: torch.distributed docs, Work.is_success, Work.exception: an operation that failed is not
a success, and its exception is given.

Happens: wait() raises, and afterwards is_success() is True and exception() is None.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: reduce_scatter/failure-is-told
# shows: is_success

import signal
import tempfile
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=2), 2, rank)
    if rank == 0:
        work = dist.reduce_scatter(torch.zeros(1), [torch.ones(1)] * 2, async_op=True)
        try:
            work.wait()
        except RuntimeError:
            assert not work.is_success(), "is_success() is True after wait() raised"
    else:
        time.sleep(4)


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
