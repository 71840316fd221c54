"""A step of a pipeline after one that raised goes back from old losses

Promised: each step has its own losses and gradients; torch docs, step.

Happens: losses of a step that raised are kept. The next step's first backward is that of an old
loss, which gives other gradients or an error; with losses=[], each further step raises.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: pipeline/after-an-exception
# shows: Expecting 2 losses but got

import signal
import tempfile
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining


def run(rank, init_method):
    signal.alarm(60)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 1, rank)
    layer, raising = nn.Linear(2, 2), []

    def loss(output, target):
        if raising and raising.pop():
            raise KeyError
        return nn.functional.mse_loss(output, target)

    stage = pipelining.PipelineStage(layer, 0, 1, torch.device("cpu"))
    schedule = pipelining.ScheduleGPipe(stage, 2, loss_fn=loss)
    x = torch.ones(2, 2)
    schedule.step(x, target=x)
    raising += [True, False]
    with suppress(KeyError):
        schedule.step(x, target=x)
    schedule.step(x, target=x, losses=[])


if __name__ == "__main__":
    try:
        run(0, f"file://{tempfile.mkdtemp()}/store")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
