"""A pending result of a functional collective is pickled before it has come

Promised: torch.distributed._functional_collectives, AsyncCollectiveTensor: it is waited for
before its first use.

Happens: pickle and torch.save read the memory of the result without waiting, so that a checkpoint
has this rank's own input, or whatever is there by then.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: functional/pending/saved
# shows: pickled \[1

import pickle
import signal
import tempfile
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.multiprocessing as mp


def run(rank, init_method):
    signal.alarm(60)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD) * 1  # the first one imports much
    if rank == 1:
        time.sleep(1)
    result = functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD)
    loaded = pickle.loads(pickle.dumps(result))
    functional.wait_tensor(result)
    pickled = (loaded.elem if hasattr(loaded, "elem") else loaded).tolist()
    assert pickled == [2, 2], f"pickled {pickled} of a sum of ones"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
