"""parallelize_module forgets src_data_rank where a plan names the module itself

Promised: torch docs, parallelize_module, src_data_rank: with None each rank uses its local data.

Happens: for the empty name in a plan, which stands for the module itself, the argument is not
passed on: the values of the first rank are sent to all others.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: tp/own-data-of-the-module
# shows: rank 1 has the values of rank 0

import signal
import tempfile
from datetime import timedelta

import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module


def run(rank, init_method):
    signal.alarm(60)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    mesh = init_device_mesh("cpu", (2,))
    linear = nn.Linear(2, 2, bias=False)
    nn.init.constant_(linear.weight, rank)
    parallelize_module(linear, mesh, {"": ColwiseParallel()}, src_data_rank=None)
    has = linear.weight.to_local()[0, 0].item()
    assert has == rank, f"rank {rank} has the values of rank {has:g}"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
