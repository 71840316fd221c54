"""TORCH_DISTRIBUTED_DEBUG=DETAIL reports garbage if ranks differ in the number of dimensions

Promised: torch.distributed docs, TORCH_DISTRIBUTED_DEBUG=DETAIL: the error shows the calls of the
ranks that disagree.

Happens: the descriptions differ in length and are read as if they did not: an error about
something else.

Severity: wrong error
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: mismatch/debug-detail-of-other-dimensions
# shows: the error is

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    try:
        dist.all_reduce(torch.ones(8) if rank == 0 else torch.ones(3, 5))
    except RuntimeError as error:
        told = " ".join(str(error).split())
        assert "[8]" in told and "[3, 5]" in told, f"the error is {told[:150]}"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
