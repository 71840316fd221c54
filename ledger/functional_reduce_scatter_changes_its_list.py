"""reduce_scatter_tensor_coalesced puts other tensors in the list that it is given

Promised: its docstring: the input tensors are left unmodified.

Happens: where the dimension is not the first, the caller's list has the tensor's chunks one below
the other afterwards: the next call with it reduces other numbers.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: functional/coalesced-lists
# shows: the list has a tensor of \(4, 1\)

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
    xs = [torch.ones(2, 2)]
    for y in functional.reduce_scatter_tensor_coalesced(xs, "sum", [1], dist.group.WORLD):
        functional.wait_tensor(y)
    size = tuple(xs[0].shape)
    assert size == (2, 2), f"the list has a tensor of {size}"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
