"""A zero bubble schedule gives a wrong gradient of a layer that is used twice

Promised: a pipeline has the gradients of one process.

Happens: the gradient is one and a half times what it is: one of the two uses counts twice.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: pipeline/used-twice
# shows: of the gradient

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed import pipelining


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.layer.weight)

    def forward(self, x):
        return self.layer(self.layer(x)) + x


def run(rank, init_method):
    signal.alarm(60)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    layers, cpu = [Twice(), Twice()], torch.device("cpu")
    stages = [pipelining.PipelineStage(m, rank + 2 * i, 4, cpu) for i, m in enumerate(layers)]
    schedule = pipelining.ScheduleInterleavedZeroBubble(stages, 2, loss_fn=lambda y, _: y.sum())
    schedule.step(*([torch.ones(2, 1)] if rank == 0 else []), target=torch.zeros(2, 1))
    shares = [layer.layer.weight.grad.item() / 16 for layer in layers]
    assert shares == [1, 1], f"{shares} of the gradient"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
