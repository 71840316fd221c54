"""A pending result that was dropped keeps its memory for ever

Promised: an early version waited when a result was dropped (pytorch 107250); Python frees what is
not referred to.

Happens: torch keeps the call for wait_tensor, and the call keeps the result, and the group's
threads after destroy_process_group.

Severity: leak
Taste: perhaps: a result that is not wanted is a collective too many
Upstream: none found, searched in November 2026
"""
# deviations: functional/pending/dropped
# shows: memory of a dropped result

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.multiprocessing as mp
from torch.multiprocessing.reductions import StorageWeakRef


def run(rank, init_method):
    signal.alarm(60)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    result = functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD)
    memory = StorageWeakRef(result.elem.untyped_storage())
    del result
    functional.wait_tensor(functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD))
    assert memory.expired(), "the memory of a dropped result is kept"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
