"""Two stages of one rank that follow each other send each other messages

Promised: torch docs, ScheduleZBVZeroBubble: it runs on any backend that has messages to others.

Happens: On gloo, which has no connection to itself, the step fails: Pair is not connected.

Severity: wrong error
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: pipeline/zbv, pipeline/other-batch-size
# shows: not connected

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed import pipelining


def run(rank, init_method):
    signal.alarm(60)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    stages = [
        pipelining.PipelineStage(nn.Linear(2, 2), index, 4, torch.device("cpu"))
        for index in ([0, 3] if rank == 0 else [1, 2])
    ]
    schedule = pipelining.ScheduleZBVZeroBubble(stages, 2, loss_fn=nn.functional.mse_loss)
    schedule.step(*([torch.ones(2, 2)] if rank == 0 else []), target=torch.zeros(2, 2))


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
