"""FSDP with CPUOffload fails in the first forward on a machine without an accelerator

Promised: torch docs, cpu_offload: parameters are offloaded to the CPU; where they are there
already, there is nothing to do.

Happens: the gradients' memory is pinned, which needs an accelerator: RuntimeError.

Severity: missing
Taste: perhaps: offloading to the CPU from the CPU is of use in tests alone
Upstream: none found, searched in November 2026
"""
# deviations: fsdp/cpu-offload
# shows: Error

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    options = {"cpu_offload": CPUOffload(True), "device_id": torch.device("cpu")}
    model = FullyShardedDataParallel(torch.nn.Linear(2, 2), **options)
    model(torch.ones(1, 2)).sum().backward()


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
