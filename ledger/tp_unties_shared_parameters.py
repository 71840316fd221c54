"""parallelize_module unties parameters that two layers share

Promised: torch docs, nn.Module.parameters: a parameter that modules share is one parameter; an
optimizer trains it once, by the sum of its gradients.

Happens: each layer of the plan registers a new parameter of its own. The embedding and the head
of a model are then trained apart, without a word.

Severity: silent wrong data
Taste: perhaps: a style is told of one layer at a time
Upstream: none found, searched in November 2026
"""
# deviations: tp/tied
# shows: 2 parameters where there was 1

import signal
import tempfile
from datetime import timedelta

import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def run(rank, init_method):
    signal.alarm(60)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 4, bias=False))
    model[1].weight = model[0].weight
    rows = RowwiseParallel(input_layouts=Replicate())
    parallelize_module(model, mesh, {"0": rows, "1": ColwiseParallel()})
    count = len(list(model.parameters()))
    assert count == 1, f"{count} parameters where there was 1"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
