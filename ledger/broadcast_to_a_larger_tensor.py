"""broadcast into a larger tensor fills its beginning without a word

Promised: an error: the tensor "must have the same number of elements in all processes"
(torch.distributed docs, broadcast).

Happens: Gloo takes a message shorter than expected; the end of the tensor is what it was.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: mismatch/broadcast-numel
# shows: x is

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    x = torch.full((2 + 2 * rank,), float(rank))
    try:
        dist.broadcast(x, 0)
        dist.barrier()
    except RuntimeError:
        pass
    else:
        assert rank == 0, f"x is {x.tolist()}"
        dist.barrier()


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
