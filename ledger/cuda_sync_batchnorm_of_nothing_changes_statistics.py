"""SyncBatchNorm moves running_mean towards zero if the batch is empty on all ranks

Promised: BatchNorm leaves its statistics as they are if the batch is empty.

Happens: an empty batch counts as one of zeros.

Severity: silent wrong data
Taste: no
Upstream: https://github.com/pytorch/pytorch/issues/36530
"""
# deviations: sync_batchnorm/empty-statistics on cuda
# shows: running_mean is
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
    norm = torch.nn.SyncBatchNorm(2).cuda()
    norm.running_mean.fill_(1)
    norm(torch.ones(0, 2, device="cuda"))
    got = norm.running_mean.tolist()
    assert got == [1, 1], f"running_mean is {got}, not 1"


if __name__ == "__main__":
    if not torch.cuda.is_available():
        raise SystemExit("not run: there is no CUDA device")
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="spawn")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
