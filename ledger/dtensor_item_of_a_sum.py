"""item of a DTensor reads this rank's share of a sum

Promised: torch docs, torch.distributed.tensor: a DTensor computes what the whole tensor would.

Happens: item, float and int of a result along shards, such as x.sum(), read the local
tensor, one rank's share as long as the sum is pending: ranks get different numbers, none of them
right.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: dtensor/numbers-of-sums
# shows: the sum of 1 and 2 is [12]

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
    x = distribute_tensor(torch.tensor([1.0, 2.0]), mesh, [Shard(0)])
    total = x.sum().item()
    assert total == 3, f"the sum of 1 and 2 is {total:g}"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
