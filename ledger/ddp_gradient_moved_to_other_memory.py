"""DDP with gradient_as_bucket_view stops averaging a gradient whose .data was assigned

Promised: p.grad.data = ... gives the gradient other contents (Module.to does it); gradients are
averaged whatever memory they are in.

Happens: the bucket's view is the gradient tensor itself and moves with it: from then on gradients
are not those of the bucket.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: ddp/gradients/other-memory
# shows: gradient is

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    module = torch.nn.Linear(1, 1)
    model = DistributedDataParallel(module, gradient_as_bucket_view=True)
    x = torch.tensor([[1.0 + 2 * rank]])  # the mean is 2
    for _ in range(4):
        model(x).sum().backward()
        grad = module.weight.grad.item()
        module.weight.grad.data = torch.zeros(1, 1)
    assert grad == 2, f"the last gradient is {grad}, not 2"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
