"""On the CPU all shards of a DTensor get the same random numbers

Promised: torch.distributed.tensor._random: shards get different random numbers, replicas the
same.

Happens: without a generator that knows the shards, each rank draws from the beginning: dropout
masks and initial weights repeat from shard to shard. A warning says that support may not be
complete.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: dtensor/random/shards
# shows: numbers come again

import signal
import tempfile
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import tensor as dt
from torch.distributed.device_mesh import init_device_mesh


def run(rank, init_method):
    signal.alarm(60)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(1)
    x = dt.zeros(2, device_mesh=mesh, placements=[dt.Shard(0)]).uniform_().full_tensor()
    assert x[0] != x[1], f"numbers come again: {x.tolist()}"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
