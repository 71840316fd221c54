"""DDP with static_graph does not average the first backward after an autograd.grad

Promised: torch docs, DistributedDataParallel: static_graph supports all that is static;
torch.autograd.grad with respect to inputs (a gradient penalty) reduces nothing and works without
static_graph.

Happens: the end of autograd.grad is taken for the end of the first backward pass, whose gradients
stay local.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: ddp/static-graph/gradient-penalty
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
    model = DistributedDataParallel(module, static_graph=True)
    x = torch.tensor([[1.0 + 2 * rank]], requires_grad=True)
    y = model(x)
    torch.autograd.grad(y.sum(), x, retain_graph=True)
    y.sum().backward()
    assert module.weight.grad.item() == 2, f"the gradient is {module.weight.grad.item()}, not 2"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
