"""DDP stops averaging gradients after module.double().float()

Promised: DistributedDataParallel averages gradients; a conversion to another dtype and back
leaves the model what it was, or is refused.

Happens: the parameters have new gradient accumulators, without DDP's hooks: gradients stay local,
without a word.

Severity: silent wrong data
Taste: no
Upstream: https://github.com/pytorch/pytorch/issues/104336
"""
# deviations: ddp/converted-module
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
    model = DistributedDataParallel(module)
    module.double()
    module.float()
    model(torch.tensor([[1.0 + 2 * rank]])).sum().backward()
    assert module.weight.grad.item() == 2, f"the gradient is {module.weight.grad.item()}, not 2"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
