"""DDP on Gloo at TORCH_DISTRIBUTED_DEBUG=DETAIL ends the process

Promised: torch.distributed docs, TORCH_DISTRIBUTED_DEBUG=DETAIL: meant for models that use
DistributedDataParallel.

Happens: the logger takes the ProcessGroupWrapper for a ProcessGroupGloo when it asks for the
number of threads: the process dies.

It reads memory of another class: with torch 2.14 not every run dies.

Severity: crash
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: ddp/debug-detail
# shows: signal SIG

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
