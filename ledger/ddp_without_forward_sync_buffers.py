"""DistributedDataParallel has no argument forward_sync_buffers before torch 2.13

Promised: torch 2.13 docs, DistributedDataParallel, forward_sync_buffers.

Happens: TypeError with earlier versions.

Severity: missing
Taste: yes: a feature that came later
Upstream: none known
"""
# deviations: ddp/buffers/forward-sync-off
# shows: TypeError

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    DistributedDataParallel(torch.nn.Linear(2, 2), forward_sync_buffers=False)


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
