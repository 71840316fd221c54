"""The gradient of torch.distributed.nn.functional.gather is wrong for expanded gradients

Promised: backward hands each rank its part of the gradient; of y.sum() it is all ones.

Happens: the gradient of a sum is an expanded tensor, which Gloo's scatter takes for dense memory:
garbage in x.grad.

Severity: silent wrong data
Taste: no
Upstream: https://github.com/pytorch/pytorch/issues/192920
"""
# deviations: autograd/layouts-of-lists
# shows: x.grad is

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as nn
import torch.multiprocessing as mp


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    x = torch.arange(4.0).requires_grad_()
    parts = nn.gather(x, 0)
    sum(part.sum() for part in parts).backward()
    assert x.grad.tolist() == [1] * 4, f"x.grad is {x.grad.tolist()}"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
