"""_update_process_group after an error in backward spoils the next gradients

Promised: DistributedDataParallel._update_process_group: makes training possible again with
another group after a failure.

Happens: what the failed backward had launched goes on in the same buckets and writes into them:
the next gradients are wrong unless it was quick.

Severity: silent wrong data
Taste: perhaps: the function is private
Upstream: none found, searched in November 2026
Related: https://github.com/pytorch/pytorch/pull/114194
"""
# deviations: ddp/update-group/after-an-error-in-backward
# shows: gradient is|unused is
# seen: a race

import contextlib
import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel


def fail(grad):
    raise ArithmeticError


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    module = torch.nn.Linear(1000, 1000)
    model = DistributedDataParallel(module)
    for _ in range(10):
        x = torch.full((1, 1000), 100.0, requires_grad=True).clone()
        x.register_hook(fail)
        with contextlib.suppress(ArithmeticError):
            model(x).sum().backward()
        model._update_process_group(dist.new_group([0, 1]))
        model.zero_grad()
        model(torch.full((1, 1000), 1.0 + 2 * rank)).sum().backward()
        assert module.weight.grad.eq(2).all(), f"a gradient is {module.weight.grad.unique()}, not 2"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
