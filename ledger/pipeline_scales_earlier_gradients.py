"""A step of a pipeline also divides the gradients of earlier steps

Promised: torch docs, Tensor.backward: gradients are added to those that are there; scale_grads, the
default of schedules, makes one step's gradients a mean.

Happens: after its last backward a step divides all that is in the gradients. Two steps of four
microbatches give 1.25 times the gradient, and not twice.

Severity: silent wrong data
Taste: no
Upstream: https://github.com/pytorch/torchtitan/issues/1733
"""
# deviations: pipeline/accumulated
# shows: 1.25 times

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
    layer = nn.Linear(2, 2, bias=False)
    stage = pipelining.PipelineStage(layer, 0, 1, torch.device("cpu"))
    schedule = pipelining.ScheduleGPipe(stage, 4, loss_fn=nn.functional.mse_loss)
    x, y = torch.ones(4, 2), torch.zeros(4, 2)
    schedule.step(x, target=y)
    once = layer.weight.grad.clone()
    schedule.step(x, target=y)
    times = (layer.weight.grad / once)[0, 0].item()
    assert abs(times - 2) < 1e-3, f"two steps give {times:g} times the gradient of one"


if __name__ == "__main__":
    try:
        run(0, f"file://{tempfile.mkdtemp()}/store")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
