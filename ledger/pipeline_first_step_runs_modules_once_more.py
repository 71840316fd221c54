"""The first step of a pipeline runs each module once more, on memory that was never written

Promised: torch docs, schedules: a step runs each stage once for each microbatch.

Happens: sizes are found out by a forward of the module in training mode; all stages but the first
get a tensor that nothing was written into. The running mean of a batch norm takes it in, and may be
anything from then on.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: pipeline/statistics
# shows: went through

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
    norm = nn.BatchNorm1d(2)
    stage = pipelining.PipelineStage(norm, rank, 2, torch.device("cpu"))
    schedule = pipelining.ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
    x = torch.arange(8.0).view(4, 2)
    schedule.step(*([x] if rank == 0 else []), target=x if rank else None)
    count = norm.num_batches_tracked.item()
    assert count == 2, f"{count} microbatches of 2 went through stage {rank}"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
