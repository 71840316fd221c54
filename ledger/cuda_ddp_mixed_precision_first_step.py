"""DDP with mixed_precision reads the first step's gradients from uninitialized memory

Promised: gradients of the first step are averages like those of the second.

Happens: each bucket is given new memory of the lower precision, but its views stay those of the
old one.

Severity: silent wrong data
Taste: perhaps: _MixedPrecision is private
Upstream: none found, searched in November 2026
"""
# deviations: ddp/mixed-precision/average on cuda
# shows: gradient is
# device: cuda

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    low = _MixedPrecision(torch.float16, torch.float16, torch.float16)
    module = torch.nn.Linear(1, 1).cuda()
    model = DistributedDataParallel(module, mixed_precision=low)
    model(torch.tensor([[1.0 + 2 * rank]], device="cuda")).float().sum().backward()
    assert module.weight.grad.item() == 2, f"the gradient is {module.weight.grad.item()}, not 2"


if __name__ == "__main__":
    if not torch.cuda.is_available():
        raise SystemExit("not run: there is no CUDA device")
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="spawn")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
