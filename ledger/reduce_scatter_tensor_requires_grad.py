"""The output of reduce_scatter_tensor requires gradients if the input does

Promised: collectives of torch.distributed are not differentiable; the outputs of all_reduce,
all_gather and reduce_scatter have no history.

Happens: y.requires_grad becomes True, with a CopyBackwards that is not the gradient of the
operation.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: surroundings/no-history
# shows: grad_fn

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    y = torch.zeros(2)
    dist.reduce_scatter_tensor(y, torch.ones(4, requires_grad=True))
    assert not y.requires_grad, f"y has the grad_fn {y.grad_fn}"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
