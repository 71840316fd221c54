"""FSDP with HYBRID_SHARD over groups of one rank does not average gradients

Promised: torch docs, HYBRID_SHARD: gradients are averaged over the replicas.

Happens: the strategy becomes NO_SHARD over the group of one rank, and the replicas drift apart,
without a word.

Severity: silent wrong data
Taste: no
Upstream: https://github.com/pytorch/pytorch/issues/154888
"""
# deviations: fsdp/hybrid-of-single-ranks
# shows: gradient is

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
    groups = [dist.new_group([0]), dist.new_group([1])]
    model = FullyShardedDataParallel(
        torch.nn.Linear(1, 1, bias=False),
        process_group=(groups[rank], dist.new_group([0, 1])),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_id=torch.device("cpu"),
    )
    model(torch.tensor([[1.0 + 2 * rank]])).sum().backward()
    grad = next(model.parameters()).grad.item()
    assert grad == 2, f"the gradient is {grad}, not 2"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
