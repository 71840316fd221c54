"""In loss_parallel the gradient of log_softmax is wrong outside of cross_entropy

Promised: a derivative of log_softmax, or an error: torch docs, loss_parallel, say that only
cross_entropy is supported.

Happens: the backward of log_softmax is replaced by the identity, which is right before nll_loss
alone; other losses on it are trained by a wrong gradient.

Severity: silent wrong data
Taste: no
Upstream: https://github.com/pytorch/pytorch/issues/190746
"""
# deviations: tp/loss/other-losses
# shows: the gradient is off by

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
    whole = torch.arange(4.0).view(1, 4).requires_grad_()
    functional.log_softmax(whole, 1).pow(2).sum().backward()
    logits = distribute_tensor(whole.detach(), mesh, [Shard(1)]).requires_grad_()
    try:
        with loss_parallel():
            functional.log_softmax(logits, 1).pow(2).sum().backward()
    except Exception:
        return
    off = (logits.grad.full_tensor() - whole.grad).abs().max()
    assert off < 1e-4, f"the gradient is off by {off:g}"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
