"""A batch that is not in the first dimension has another stride than a pipeline expects

Promised: torch docs, TensorChunkSpec(split_dim): the batch may be in another dimension.

Happens: PipeliningShapeError: microbatches are views, and their strides are compared with those of
copies.

Severity: wrong error
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: pipeline/other-dimension
# shows: stride mismatch

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining.microbatch import TensorChunkSpec


class Columns(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))

    def forward(self, x):
        return self.weight @ x


def run(rank, init_method):
    signal.alarm(60)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 1, rank)
    stage = pipelining.PipelineStage(Columns(), 0, 1, torch.device("cpu"))
    spec = TensorChunkSpec(1)
    schedule = pipelining.ScheduleGPipe(
        stage, 2, loss_fn=lambda y, _: y.sum(), args_chunk_spec=(spec,), output_merge_spec=spec
    )
    schedule.step(torch.ones(2, 8), target=torch.zeros(8))


if __name__ == "__main__":
    try:
        run(0, f"file://{tempfile.mkdtemp()}/store")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
