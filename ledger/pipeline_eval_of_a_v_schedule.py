"""eval of a schedule whose stages form a V raises an AssertionError

Promised: torch docs, eval: runs one iteration of the schedule, forward only.

Happens: in ZBVZeroBubble and DualPipeV, gradients are handed from one stage of a rank to the other
also in eval, where there are none. The other ranks wait.

Severity: wrong error
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: pipeline/eval-of-a-v
# shows: can't steal_bwd_input

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
    stages = [
        pipelining.PipelineStage(nn.Linear(2, 2), i, 2, torch.device("cpu")) for i in range(2)
    ]
    schedule = pipelining.ScheduleZBVZeroBubble(stages, 2, loss_fn=nn.functional.mse_loss)
    schedule.eval(torch.ones(2, 2), target=torch.ones(2, 2))


if __name__ == "__main__":
    try:
        run(0, f"file://{tempfile.mkdtemp()}/store")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
