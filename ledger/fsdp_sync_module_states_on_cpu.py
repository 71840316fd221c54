"""FSDP refuses sync_module_states on the CPU

Promised: torch docs, sync_module_states: broadcasts module parameters and buffers from rank 0;
FSDP otherwise runs on the CPU with gloo.

Happens: ValueError: parameters and buffers must be on GPU, also with
device_id=torch.device("cpu").

Severity: missing
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: fsdp/sync-module-states
# shows: ValueError

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import FullyShardedDataParallel


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    FullyShardedDataParallel(
        torch.nn.Linear(2, 2), device_id=torch.device("cpu"), sync_module_states=True
    )


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
