"""A zero bubble schedule fails if a stage is given a keyword argument that is no tensor

Promised: torch docs, split_args_kwargs_into_chunks: values that are no tensors are given to each
microbatch.

Happens: AttributeError: 'int' object has no attribute 'requires_grad'.

Severity: wrong error
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: pipeline/keywords
# shows: requires_grad

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed import pipelining


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x, factor):
        return self.layer(x) * factor


def run(rank, init_method):
    signal.alarm(60)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    layers, cpu = [Stage(), Stage()], torch.device("cpu")
    stages = [pipelining.PipelineStage(m, rank + 2 * i, 4, cpu) for i, m in enumerate(layers)]
    schedule = pipelining.ScheduleInterleavedZeroBubble(stages, 2, loss_fn=lambda y, _: y.sum())
    x = [torch.ones(2, 2)] if rank == 0 else []
    schedule.step(*x, factor=2, target=torch.zeros(2, 2))


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
