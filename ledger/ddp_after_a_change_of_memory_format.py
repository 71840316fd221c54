"""DDP permutes gradients after model.to(memory_format=torch.channels_last)

Promised: DistributedDataParallel averages gradients element by element; the memory format is a
matter of performance.

Happens: buckets keep the strides of construction, and gradients of other strides are read in the
wrong order, without a word.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
Related: https://github.com/pytorch/pytorch/issues/47163
"""
# deviations: ddp/gradients/memory-format-later
# shows: gradients differ

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
    torch.manual_seed(0)
    module = torch.nn.Conv2d(2, 2, 2)
    model = DistributedDataParallel(module)
    model.to(memory_format=torch.channels_last)
    x = torch.arange(18.0).reshape(1, 2, 3, 3)
    (want,) = torch.autograd.grad(module(x).sum(), [module.weight])
    model(x).sum().backward()
    got = module.weight.grad
    assert torch.allclose(got, want), f"gradients differ: {got[0].tolist()} not {want[0].tolist()}"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
