"""loss_parallel cannot ignore targets where classes have weights

Promised: torch docs, cross_entropy: a target of ignore_index does not contribute to the gradient,
with weights or without; loss_parallel: cross_entropy may be used as usual, with weights.

Happens: backward looks up the weight of the class -100, and raises.

Severity: wrong error
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: tp/loss/weighted-and-ignored
# shows: out of bounds

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional


def run(rank, init_method):
    signal.alarm(60)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    mesh = init_device_mesh("cpu", (2,))
    logits = distribute_tensor(torch.zeros(2, 4), mesh, [Shard(1)]).requires_grad_()
    with loss_parallel():
        functional.cross_entropy(logits, torch.tensor([1, -100]), torch.ones(4)).backward()


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
