"""An empty input of SyncBatchNorm gets no gradient

Promised: BatchNorm gives an empty input an empty gradient.

Happens: x.grad is None.

Severity: missing
Taste: perhaps: there is nothing in it
Upstream: https://github.com/pytorch/pytorch/issues/36530
"""
# deviations: sync_batchnorm/empty-on-all-ranks on cuda
# shows: None
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
    x = torch.ones(0, 2, device="cuda", requires_grad=True)
    torch.nn.SyncBatchNorm(2).cuda()(x).sum().backward()
    assert x.grad is not None, "x.grad is None"


if __name__ == "__main__":
    if not torch.cuda.is_available():
        raise SystemExit("not run: there is no CUDA device")
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="spawn")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
