"""get_future() of a reduce_scatter on Gloo is not implemented

Promised: torch.distributed docs, Work.get_future: supported by Gloo for all collectives (DDP's
communication hooks rely on it).

Happens: RuntimeError "Work::getFuture not implemented."

Severity: missing
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: reduce_scatter/future
# shows: getFuture not implemented

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
    work.get_future().wait()


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
