"""FSDP with a param_dtype loses gradients if an earlier forward had no backward

Promised: a forward whose result is dropped does not change the next step; without mixed precision
it does not.

Happens: the hook that reduces sits on the first forward's accumulator, which the backward never
reaches: no gradient is reduced.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: fsdp/dropped-low-precision-forward
# shows: gradients are

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    model = FullyShardedDataParallel(
        torch.nn.Linear(2, 2, bias=False),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
        device_id=torch.device("cpu"),
    )
    x = torch.ones(1, 2)
    model(x)
    model(x).sum().backward()
    grads = [p.grad.tolist() if p.grad is not None else None for p in model.parameters()]
    assert grads == [[1, 1]], f"gradients are {grads}, not [[1, 1]]"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
