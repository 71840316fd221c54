"""Functional all_gather refuses tensors that are not contiguous

Promised: torch.distributed._functional_collectives.all_gather_tensor takes a tensor; all_reduce
takes transposed ones.

Happens: before torch 2.12: AssertionError; so does the backward of reduce_scatter, which uses it.

Severity: wrong error
Taste: no
Upstream: https://github.com/pytorch/pytorch/pull/177965
"""
# deviations: functional/any-call
# shows: AssertionError

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.multiprocessing as mp


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    y = functional.all_gather_tensor(torch.ones(4, 2).t(), 0, dist.group.WORLD)
    assert y.shape == (4, 4)


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
