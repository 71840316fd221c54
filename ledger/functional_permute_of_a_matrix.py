"""permute_tensor takes tensors of one dimension alone

Promised: its docstring: it permutes the elements of the tensor; nothing is said of dimensions.

Happens: the number of elements is taken for the number of rows, and refused as a split size,
unless rows have one element; a tensor of no dimension kills the process.

Severity: missing
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: functional/permuted-shapes
# shows: Split sizes

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
    x = torch.full((2, 3), rank + 1.0)
    y = functional.permute_tensor(x, [1, 0], dist.group.WORLD) * 1
    assert y.tolist() == [[2.0 - rank] * 3] * 2, f"y is {y.tolist()}"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
