"""The gradient of a gathered tensor must be contiguous under torch.compile

Promised: gradients of functional collectives are those of eager code, whatever their layout.

Happens: RuntimeError: Expected input.is_contiguous() to be true, but got false.

Severity: wrong error
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: compile/pending-inputs
# shows: is_contiguous

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional


def run(rank, init_method):
    signal.alarm(60)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 1, rank)
    x = torch.ones(4, 4, requires_grad=True)
    wide = functional.all_gather_tensor_autograd(x, 0, dist.group.WORLD.group_name)
    torch.compile(lambda y: y.reshape(2, -1).sum() * 2, backend="eager")(wide).backward()
    assert x.grad.eq(2).all()


if __name__ == "__main__":
    try:
        run(0, f"file://{tempfile.mkdtemp()}/store")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
