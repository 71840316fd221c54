"""Gloo collectives read and write the wrong memory of a strided view

Promised: torch.distributed docs, all_reduce: "operates in-place" on the tensor; other backends
refuse tensors that are not contiguous.

Happens: all_reduce, broadcast, reduce, reduce_scatter, scatter and all_to_all_single take the
view for dense memory: neighbours are overwritten, and half of the elements are not reduced.

Severity: silent wrong data
Taste: no
Upstream: https://github.com/pytorch/pytorch/issues/192920
"""
# deviations: all_reduce/strided
# shows: x is \[0.0, 4.0, 4.0, 6.0\]

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    x = torch.arange(8.0)[::2]
    dist.all_reduce(x)
    assert x.tolist() == [0, 4, 8, 12], f"x is {x.tolist()}"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
