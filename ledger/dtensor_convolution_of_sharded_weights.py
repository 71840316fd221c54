"""A convolution of DTensors with sharded weights has the wrong shape

Promised: torch docs, torch.distributed.tensor: a DTensor computes what the whole tensor would.

Happens: each rank convolves with its own output channels, and the result counts as a
replica, of which each rank has other channels. Shards of channels or of the length
go wrong in similar ways.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: dtensor/operators/cut-convolutions
# shows: a rank has 2 channels of 4

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import functional


def run(rank, init_method):
    signal.alarm(60)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.ones(1, 2, 6), mesh, [Replicate()])
    weight = distribute_tensor(torch.ones(4, 2, 3), mesh, [Shard(0)])
    got = functional.conv1d(x, weight).full_tensor()
    assert got.size(1) == 4, f"a rank has {got.size(1)} channels of 4"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
