"""A mean loss of uneven shards of a DTensor is an average of averages

Promised: torch docs, torch.distributed.tensor: a DTensor computes what the whole tensor would.

Happens: each rank averages over its own rows, and the ranks' results are averaged, though they have
unequal numbers of rows. mean itself has been mended (pytorch 162692), losses have not.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: dtensor/operators/mean-losses
# shows: the loss is 0.5

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
    x = distribute_tensor(torch.tensor([0.0, 0.0, 1.0]), mesh, [Shard(0)])
    zeros = distribute_tensor(torch.zeros(3), mesh, [Shard(0)])
    loss = functional.mse_loss(x, zeros).full_tensor()
    assert abs(loss - 1 / 3) < 1e-6, f"the loss is {loss:g}, and not a third"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
