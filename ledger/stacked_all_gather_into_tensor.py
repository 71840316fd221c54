"""Gloo refuses the stacked form of all_gather_into_tensor and reduce_scatter_tensor

Promised: torch.distributed docs, all_gather_into_tensor: the output may be "(ii) a stack of all
the input tensors along the primary dimension".

Happens: Gloo raises; NCCL takes it.

Severity: missing
Taste: no
Upstream: https://github.com/pytorch/pytorch/issues/178798
"""
# deviations: all_gather_into_tensor/stacked
# shows: Error

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    y = torch.zeros(2, 3)
    dist.all_gather_into_tensor(y, torch.full((3,), float(rank)))
    assert y.tolist() == [[0] * 3, [1] * 3], f"y is {y.tolist()}"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
