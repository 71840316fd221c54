"""DDP with mixed_precision fails in a forward under no_grad

Promised: evaluation under no_grad works without mixed_precision.

Happens: a forward under no_grad looks for the gradient function of the parameters' views, and
there is none: AttributeError.

Severity: wrong error
Taste: perhaps: _MixedPrecision is private
Upstream: none found, searched in November 2026
"""
# deviations: ddp/mixed-precision/without-backward on cuda
# shows: AttributeError
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
    low = _MixedPrecision(param_dtype=torch.float16)
    model = DistributedDataParallel(torch.nn.Linear(2, 2).cuda(), mixed_precision=low)
    with torch.no_grad():
        model(torch.ones(1, 2, device="cuda"))


if __name__ == "__main__":
    if not torch.cuda.is_available():
        raise SystemExit("not run: there is no CUDA device")
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="spawn")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
