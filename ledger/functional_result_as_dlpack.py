"""from_dlpack and share_memory_ of a pending result kill the process

Promised: torch docs, torch.from_dlpack: it takes any tensor, or raises.

Happens: SIGSEGV: the wrapper has no memory of its own, and is asked for its address.

Severity: crash
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: functional/pending/exported
# shows: SIGSEGV

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.multiprocessing as mp


def run(rank, init_method):
    signal.alarm(60)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    result = functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD)
    exported = torch.from_dlpack(result)
    assert exported.sum() == 4, f"exported {exported.tolist()}"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
