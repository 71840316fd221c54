"""loss_parallel gives a wrong gradient for logits of four dimensions

Promised: torch docs, loss_parallel: cross_entropy gives the numbers that it gives as usual; among
its inputs are (N, C, d1, d2), as of images.

Happens: backward brings the classes to the end by exchanging two dimensions of the logits: for
(N, C, H, W) ones are subtracted in the order W, H, and the targets have the order H, W.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: tp/loss/images
# shows: the gradient is off by 1

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
    target = torch.tensor([[[0, 1], [2, 3]]])
    whole = torch.zeros(1, 4, 2, 2, requires_grad=True)
    functional.cross_entropy(whole, target, reduction="sum").backward()
    logits = distribute_tensor(torch.zeros(1, 4, 2, 2), mesh, [Shard(1)]).requires_grad_()
    with loss_parallel():
        functional.cross_entropy(logits, target, reduction="sum").backward()
    off = (logits.grad.full_tensor() - whole.grad).abs().max()
    assert off < 1e-6, f"the gradient is off by {off:g}"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
