"""PrepareModuleInput leaves a DTensor in another layout than the desired one

Promised: torch docs, PrepareModuleInput, desired_input_layouts: the inputs have the desired
layouts when the module is called.

Happens: what is compared are the two arguments, input_layouts and desired_input_layouts. A DTensor
that comes in a third layout goes into the module as it is, where these two are equal.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: tp/desired-layout
# shows: the module was given \(Shard\(dim=0\),\)

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import PrepareModuleInput, parallelize_module


def run(rank, init_method):
    signal.alarm(60)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    mesh = init_device_mesh("cpu", (2,))
    style = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
    module = parallelize_module(nn.Identity(), mesh, style)
    given = module(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])).placements
    assert given == (Replicate(),), f"the module was given {given}"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
