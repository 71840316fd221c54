"""The sums of gradients in SyncBatchNorm are rounded to half precision

Promised: batch norm of half precision computes its sums in float32.

Happens: before torch 2.15 batch_norm_backward_reduce takes each product of gradient and input, and
each partial sum that threads exchange, through the input's dtype (struct Float2 of
Normalization.cuh; not for channels-last input): for bfloat16 the sums are off by 0.02 and more.

Severity: silent wrong data
Taste: perhaps: precision is not promised
Upstream: https://github.com/pytorch/pytorch/issues/195701
"""
# deviations: sync_batchnorm/half-model on cuda
# shows: off by
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
    torch.manual_seed(0)
    x, dy = torch.randn(2, 99, 4, 10, device="cuda", dtype=torch.bfloat16)
    mean, invstd = torch.zeros(4, device="cuda"), torch.ones(4, device="cuda")
    weight = torch.ones(4, device="cuda", dtype=torch.bfloat16)
    got = torch.batch_norm_backward_reduce(dy, x, mean, invstd, weight, True, False, False)[1]
    error = (got.double() - (dy.double() * x.double()).sum((0, 2))).abs().max().item()
    assert error < 1e-3, f"the sums are off by {error}"


if __name__ == "__main__":
    if not torch.cuda.is_available():
        raise SystemExit("not run: there is no CUDA device")
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="spawn")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
