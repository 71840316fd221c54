"""FSDP.clip_grad_norm_ raises for float64

Promised: torch docs, clip_grad_norm_: no dtypes are named; torch.nn.utils.clip_grad_norm_ takes
float64.

Happens: norms are computed in float32, and float64 is not narrowed: RuntimeError.

Severity: wrong error
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: fsdp/norm-of-doubles
# shows: Error

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import FullyShardedDataParallel


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    module = torch.nn.Linear(2, 2).double()
    model = FullyShardedDataParallel(module, device_id=torch.device("cpu"))
    model(torch.ones(1, 2).double()).sum().backward()
    model.clip_grad_norm_(1.0)


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
