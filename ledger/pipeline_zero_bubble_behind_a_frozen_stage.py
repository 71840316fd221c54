"""Zero bubble schedules do not train the stage behind a frozen one

Promised: torch docs, schedules: they give each stage the gradients of its parameters.

Happens: where the input of a stage has no gradient, since nothing in front of it is trained, the
first half of the backward finds no parameters for the second: they have no gradient, or one of
some of the microbatches (DualPipeV).

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: pipeline/frozen-first-stage-without-bubbles
# shows: no gradient

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining


def run(rank, init_method):
    signal.alarm(60)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 1, rank)
    layers = [nn.Linear(2, 2) for _ in range(3)]
    layers[0].requires_grad_(False)
    stages = [pipelining.PipelineStage(m, i, 3, torch.device("cpu")) for i, m in enumerate(layers)]
    schedule = pipelining.ScheduleInterleavedZeroBubble(stages, 2, loss_fn=nn.functional.mse_loss)
    schedule.step(torch.ones(2, 2), target=torch.zeros(2, 2))
    assert layers[1].weight.grad is not None, "the stage behind a frozen one has no gradient"


if __name__ == "__main__":
    try:
        run(0, f"file://{tempfile.mkdtemp()}/store")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
