"""FSDP with SHARD_GRAD_OP keeps a frozen unit unsharded after the backward

Promised: torch docs, SHARD_GRAD_OP: parameters are resharded after the backward computation.

Happens: a frozen unit whose inputs need no gradients is taken for resharded already, and its
memory stays.

Severity: leak
Taste: no
Upstream: none found, searched in November 2026
Related: https://github.com/pytorch/pytorch/pull/101982
"""
# deviations: fsdp/freed-when-frozen-in-front
# shows: bytes are kept

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy


def wrap(module):
    strategy = ShardingStrategy.SHARD_GRAD_OP
    return FullyShardedDataParallel(
        module, sharding_strategy=strategy, device_id=torch.device("cpu")
    )


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    frozen = wrap(torch.nn.Linear(10, 10).requires_grad_(False))
    model = wrap(torch.nn.Sequential(frozen, wrap(torch.nn.Linear(10, 10))))
    model(torch.ones(1, 10)).sum().backward()
    kept = frozen._flat_param._full_param_padded.untyped_storage().size()
    assert kept == 0, f"{kept} bytes are kept"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
