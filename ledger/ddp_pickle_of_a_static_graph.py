"""A loaded DDP with static_graph does not average the first step

Promised: DistributedDataParallel can be saved and loaded (__getstate__); the loaded one averages
as the saved one does.

Happens: the loaded wrapper counts its graph as recorded already; the first step's reduction is
never asked for.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: ddp/copies/pickle-of-a-static-graph
# shows: gradient is

import pickle
import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    model = DistributedDataParallel(torch.nn.Linear(1, 1), static_graph=True)
    model(torch.ones(1, 1)).sum().backward()
    model = pickle.loads(pickle.dumps(model))
    model.zero_grad()
    model(torch.tensor([[1.0 + 2 * rank]])).sum().backward()
    grad = model.module.weight.grad.item()
    assert grad == 2, f"the gradient is {grad}, not 2"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
