"""eval of a pipeline needs a target

Promised: torch, eval(*args, target=None, losses=None): a target may be left out.

Happens: a schedule that has a loss function computes losses in eval, too, and looks for the target
of the first microbatch in None. To get outputs one has to invent targets.

Severity: wrong error
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: pipeline/eval-without-target
# shows: 'NoneType' object is not subscriptable

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
    stage = pipelining.PipelineStage(nn.Linear(2, 2), 0, 1, torch.device("cpu"))
    schedule = pipelining.ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
    schedule.eval(torch.ones(2, 2))


if __name__ == "__main__":
    try:
        run(0, f"file://{tempfile.mkdtemp()}/store")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
