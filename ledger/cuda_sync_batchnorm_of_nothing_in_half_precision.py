"""SyncBatchNorm raises for half precision if no rank has any value

Promised: with float32 it gives an empty output.

Happens: the statistics are zeros of the batch's dtype, which the kernel refuses.

Severity: wrong error
Taste: no
Upstream: none found, searched in November 2026
Related: https://github.com/pytorch/pytorch/issues/36530
"""
# deviations: sync_batchnorm/output on cuda
# shows: Error
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
    x = torch.ones(0, 1, device="cuda", dtype=torch.bfloat16)
    torch.nn.SyncBatchNorm(1).cuda()(x)


if __name__ == "__main__":
    if not torch.cuda.is_available():
        raise SystemExit("not run: there is no CUDA device")
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="spawn")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
