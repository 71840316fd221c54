"""SyncBatchNorm does not notice an input with another number of channels

Promised: an error, as BatchNorm1d gives: "running_mean should contain 3 elements not 2".

Happens: the kernels do not compare the number of channels with that of parameters and statistics,
and read beyond them.

Severity: silent wrong data
Taste: no
Upstream: none known
"""
# deviations: sync_batchnorm/other-channels on cuda
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
        torch.nn.SyncBatchNorm(2).cuda()(torch.ones(4, 3, device="cuda"))
    except RuntimeError:
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
