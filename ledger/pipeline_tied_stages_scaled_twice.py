"""A parameter that two stages of a rank share has its gradient divided twice

Promised: torch docs, scale_grads: gradients are divided by the number of microbatches.

Happens: each stage divides the gradients of its parameters. Of an embedding and a head that share
a weight, in the first and the last stage of a V, which are on one rank, a part is divided twice.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: pipeline/tied-stages
# shows: of the gradient

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
    first, last = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    last.weight = first.weight
    layers = enumerate([first, last])
    stages = [pipelining.PipelineStage(m, i, 2, torch.device("cpu")) for i, m in layers]
    loss = nn.functional.mse_loss
    x, y = torch.ones(4, 2), torch.zeros(4, 2)
    loss(last(first(x)), y).backward()
    want, first.weight.grad = first.weight.grad, None
    pipelining.ScheduleZBVZeroBubble(stages, 4, loss_fn=loss).step(x, target=y)
    share = (first.weight.grad / want)[0, 0].item()
    assert abs(share - 1) < 1e-3, f"{share:g} of the gradient"


if __name__ == "__main__":
    try:
        run(0, f"file://{tempfile.mkdtemp()}/store")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
