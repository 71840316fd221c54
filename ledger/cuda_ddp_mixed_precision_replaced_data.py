"""DDP with mixed_precision drops what is assigned to the .data of a parameter

Promised: what is assigned to the data of a parameter between steps is what the next step works
with, as without mixed_precision.

Happens: after backward the parameter has the tensor again that it had when DDP was constructed.

Severity: silent wrong data
Taste: perhaps: _MixedPrecision is private
Upstream: none found, searched in November 2026
"""
# deviations: ddp/mixed-precision/replaced-data on cuda
# shows: weight is
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
    module = torch.nn.Linear(1, 1).cuda()
    low = _MixedPrecision(param_dtype=torch.float16)
    model = DistributedDataParallel(module, mixed_precision=low)
    module.weight.data = torch.full((1, 1), 5.0, device="cuda")
    model(torch.ones(1, 1, device="cuda")).sum().backward()
    assert module.weight.item() == 5, f"the weight is {module.weight.item()}, not 5"


if __name__ == "__main__":
    if not torch.cuda.is_available():
        raise SystemExit("not run: there is no CUDA device")
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="spawn")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
