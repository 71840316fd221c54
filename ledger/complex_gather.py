"""gather refuses complex tensors on Gloo, which all_gather and scatter take

Promised: torch.distributed docs, all_gather, scatter: "Complex tensors are supported." gather is
their sibling.

Happens: "Invalid scalar type": gather does not view complex tensors as real ones.

Severity: missing
Taste: no
Upstream: none found, searched in November 2026
Related: https://github.com/pytorch/pytorch/issues/89197
"""
# deviations: gather/complex
# shows: Invalid scalar type

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    x = torch.ones(2, dtype=torch.complex64)
    dist.gather(x, [torch.zeros_like(x) for _ in range(2)] if rank == 0 else None)


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
