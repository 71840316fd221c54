"""squeeze of a DTensor drops the dimension that is sharded

Promised: torch docs, torch.distributed.tensor: a DTensor computes what the whole tensor would.

Happens: a rank whose shard has one row loses that dimension, which has more rows in the whole
tensor.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: dtensor/operators/views
# shows: the shard has

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
    x = distribute_tensor(torch.ones(1, 2), mesh, [Shard(1)])
    size = tuple(x.squeeze().to_local().shape)
    assert size == (1,), f"the shard has {size}"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
