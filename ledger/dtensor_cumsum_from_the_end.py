"""cumsum along dimension -1 of a DTensor begins anew on each rank

Promised: torch docs, torch.distributed.tensor: a DTensor computes what the whole tensor would.

Happens: whether the dimension is sharded is asked of the number as it was given: -1 is taken for a
dimension without shards, and each rank sums its own. cumprod and logcumsumexp do the same.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: dtensor/operators/running-from-the-end
# shows: the sums are \[1.0, 1.0\]

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


def run(rank, init_method):
    signal.alarm(60)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.ones(2), mesh, [Shard(0)])
    sums = x.cumsum(-1).full_tensor().tolist()
    assert sums == [1, 2], f"the sums are {sums}"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
