"""fully_shard refuses a parameter of integers that requires no gradient

Promised: torch docs, nn.Parameter, requires_grad: a parameter may require no gradient, and then it
may be of any dtype; fully_shard divides the parameters of a module.

Happens: the shard, and what the forward computes with, are made as parameters that require
gradients: RuntimeError.

Severity: missing
Taste: no
Upstream: https://github.com/pytorch/pytorch/issues/177844
"""
# deviations: fully_shard/integer-parameter
# shows: can require gradients

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    model = torch.nn.Linear(3, 2)
    model.index = torch.nn.Parameter(torch.arange(4), requires_grad=False)
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (2,)))
    model(torch.ones(1, 3)).sum().backward()
    assert model.index.full_tensor().tolist() == [0, 1, 2, 3]


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
