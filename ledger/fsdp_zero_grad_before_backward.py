"""FSDP with SHARD_GRAD_OP keeps gradients that were cleared between forward and backward

Promised: torch docs, zero_grad: the gradients are gone; the order of forward and zero_grad does
not matter to the bare module.

Happens: with use_orig_params the flat gradient stays when those of all parameters are cleared,
and the last iteration's gradients are in the sum.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: fsdp/cleared-before-backward
# shows: gradients are

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    model = FullyShardedDataParallel(
        torch.nn.Linear(2, 1, bias=False),
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    for _ in range(2):
        y = model(torch.ones(1, 2))
        model.zero_grad()
        y.sum().backward()
    grads = [p.grad.tolist() for p in model.parameters()]
    assert grads in ([[[1]]], [[1]], [[[1.0, 1.0]]]), f"gradients are {grads}, not of one backward"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
