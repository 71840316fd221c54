"""all_reduce of a sparse complex tensor does nothing

Promised: all_reduce of complex tensors sums them; a sparse one is summed or refused.

Happens: all_reduce hands a view as pairs of real numbers to the backend, which for a sparse
tensor is a copy: x is as it was.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
Related: https://github.com/pytorch/pytorch/issues/31413
"""
# deviations: sparse/complex
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
    x = torch.ones(1, dtype=torch.complex64).to_sparse()
    try:
        dist.all_reduce(x)
    except (ValueError, RuntimeError):
        pass  # refused
    else:
        assert x.to_dense().item() == 2, f"x is {x.to_dense().tolist()}"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
