"""all_reduce of a sparse float16 tensor raises

Promised: all_reduce takes float16 as a dense tensor and names no dtypes for sparse ones.

Happens: the ranks' tensors are added by an operator that torch lacks for float16 on CPU.

Severity: missing
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: sparse/float16
# shows: not implemented

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    dist.all_reduce(torch.ones(2, dtype=torch.float16).to_sparse())


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
