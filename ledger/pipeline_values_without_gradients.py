"""A pipeline waits for gradients of values that have none

Promised: torch docs, torch.distributed.pipelining: stages hand on tensors, integers among them.

Happens: RuntimeError in the backward: the stage expects to send a gradient for each value that it
was given.

Severity: wrong error
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: pipeline/several-values, pipeline/frozen-first-stage, pipeline/eval
# shows: gradients

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

    def forward(self, x, places=None):
        return (
            (self.layer(x), torch.ones(1, dtype=torch.int64)) if places is None else self.layer(x)
        )


def run(rank, init_method):
    signal.alarm(60)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    stage = pipelining.PipelineStage(Stage(), rank, 2, torch.device("cpu"))
    schedule = pipelining.ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
    x = [torch.ones(2, 2)] if rank == 0 else []
    schedule.step(*x, target=torch.zeros(2, 2))


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
