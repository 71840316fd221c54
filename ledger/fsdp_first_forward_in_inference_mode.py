"""FSDP cannot be trained after a first forward in inference mode

Promised: inference mode is over when its block is left; the bare module can be trained
afterwards.

Happens: tensors that parameters are gathered into were made in inference mode, and autograd
refuses them ever after.

Severity: wrong error
Taste: no
Upstream: https://github.com/pytorch/pytorch/issues/113203
"""
# deviations: fsdp/inference-mode
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
    model = FullyShardedDataParallel(torch.nn.Linear(2, 2), device_id=torch.device("cpu"))
    with torch.inference_mode():
        model(torch.ones(1, 2))
    model(torch.ones(1, 2)).sum().backward()


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
