"""What is written to a slice of a sharded DTensor does not reach it

Promised: torch docs, torch.distributed.tensor: a DTensor computes what the whole tensor would.

Happens: a slice along the shards is gathered into a tensor of its own; operators in place change
that one, without a word.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: dtensor/in-place/pieces
# shows: the tensor is still 0

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
    x = distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)])
    x[0].add_(1)
    got = x.full_tensor()[0, 0].item()
    assert got == 1, f"the tensor is still {got:g}"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
