"""A padded DTensor has the size that an earlier call gave

Promised: torch docs, torch.distributed.tensor: a DTensor computes what the whole tensor would.

Happens: what is known of a call is remembered without its padding or stride, so that a second one
that differs in nothing else gets the size of the first. conv1d does the same.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: dtensor/operators/turned
# shows: padded to

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional


def run(rank, init_method):
    signal.alarm(60)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.ones(3, 4), mesh, [Shard(0)])
    functional.pad(x, (1, 1))
    size = tuple(functional.pad(x, (0, 0, 1, 0)).shape)
    assert size == (4, 4), f"padded to {size}"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
