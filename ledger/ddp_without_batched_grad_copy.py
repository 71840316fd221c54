"""DistributedDataParallel has no argument batched_grad_copy before torch 2.12

Promised: torch 2.12 docs, DistributedDataParallel, batched_grad_copy.

Happens: TypeError with earlier versions.

Severity: missing
Taste: yes: a feature that came later
Upstream: none known
"""
# deviations: ddp/gradients/batched-copy
# shows: TypeError

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
    DistributedDataParallel(torch.nn.Linear(2, 2), batched_grad_copy=True)


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
