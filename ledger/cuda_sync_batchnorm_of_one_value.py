"""SyncBatchNorm trains on one value per channel if it has another rank without any

Promised: BatchNorm raises ValueError "Expected more than 1 value per channel when training";
SyncBatchNorm means the whole batch.

Happens: each rank counts its own values alone: not a word.

Severity: silent wrong data
Taste: perhaps: SyncBatchNorm checks what a rank can see
Upstream: none found, searched in November 2026
"""
# deviations: sync_batchnorm/more-than-one-value on cuda
# shows: not a word
# device: cuda

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    try:
        torch.nn.SyncBatchNorm(1).cuda()(torch.ones(1 - rank, 1, device="cuda"))
    except ValueError:
        pass
    else:
        raise AssertionError("not a word")


if __name__ == "__main__":
    if not torch.cuda.is_available():
        raise SystemExit("not run: there is no CUDA device")
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="spawn")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
