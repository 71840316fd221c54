"""Under join() an unused parameter gets a gradient of zeros if it was used before

Promised: torch docs, find_unused_parameters and join: a parameter that no rank uses keeps its
gradient, here None.

Happens: joined ranks contribute the sum of the step before, so what was used once counts as used
from then on.

Severity: silent wrong data
Taste: no
Upstream: none known
"""
# deviations: ddp/join/unused-by-those-who-are-left
# shows: the gradient of

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel


class Model(torch.nn.ModuleList):
    def forward(self, x, uses):
        return sum(self[i](x) for i in uses)


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    layers = [torch.nn.Linear(1, 1, bias=False) for _ in range(2)]
    model = DistributedDataParallel(Model(layers), find_unused_parameters=True)
    with model.join():
        for uses in [[0, 1], [0, 1], [0], [0]][: 1 + 3 * rank]:
            model.zero_grad()
            model(torch.ones(1, 1), uses).sum().backward()
    grad = layers[1].weight.grad
    assert rank == 0 or grad is None, f"the gradient of an unused parameter is {grad}, not None"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
