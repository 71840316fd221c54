"""The Work of reduce_scatter says is_completed() == False even after wait()

Promised: torch.distributed docs, Work.is_completed: true once the operation has finished; every
other collective's is.

Happens: it stays False for ever, so polling does not end.

Severity: hang
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: reduce_scatter/completes-unwaited
# shows: is_completed

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    work = dist.reduce_scatter(torch.zeros(1), [torch.ones(1)] * 2, async_op=True)
    work.wait()
    assert work.is_completed(), "is_completed() is False after wait()"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
