"""The gradient of the largest norm of a DTensor is wrong

Promised: torch docs, torch.distributed.tensor: a DTensor computes what the whole tensor would.

Happens: backward divides by the number of elements that are the largest, which each rank takes from
its own shard.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: dtensor/gradients/largest
# shows: the gradient is off

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
    whole = torch.tensor([4.0, 1.0, 4.0, 4.0], requires_grad=True)
    torch.linalg.vector_norm(whole, torch.inf).backward()
    x = distribute_tensor(whole.detach(), mesh, [Shard(0)]).requires_grad_()
    torch.linalg.vector_norm(x, torch.inf).backward()
    got = x.grad.full_tensor()
    assert torch.equal(got, whole.grad), f"the gradient is off by {(got - whole.grad).abs().max()}"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
