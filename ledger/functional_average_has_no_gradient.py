"""The functional all_reduce by "avg" cannot be differentiated

Promised: torch.distributed._functional_collectives.all_reduce has a gradient; reduce op "avg" is
one of its own names.

Happens: RuntimeError in backward, which knows "sum" alone. Mended in torch 2.14.

Severity: missing
Taste: no
Upstream: https://github.com/pytorch/pytorch/issues/190304
"""
# deviations: functional/avg-gradient-works
# shows: Error

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
    x = torch.ones(2, requires_grad=True)
    functional.all_reduce(x, "avg", dist.group.WORLD).sum().backward()
    assert x.grad.tolist() == [1, 1], f"x.grad is {x.grad.tolist()}"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
