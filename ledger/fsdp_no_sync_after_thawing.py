"""FSDP with NO_SHARD drops what no_sync accumulated for a parameter that was frozen before

Promised: torch docs, no_sync: gradients accumulate; a parameter that is trained again accumulates
like others.

Happens: a parameter that was frozen shows no gradient under no_sync, and the next forward takes
it for cleared.

Severity: silent wrong data
Taste: no
Upstream: none known
"""
# deviations: fsdp/no-sync-after-thawing
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
    layers = torch.nn.Sequential(*(torch.nn.Linear(2, 2, bias=False) for _ in range(2)))
    torch.nn.init.ones_(layers[1].weight)
    options = {"use_orig_params": True, "device_id": torch.device("cpu")}
    model = FullyShardedDataParallel(layers, sharding_strategy=ShardingStrategy.NO_SHARD, **options)
    layers[0].requires_grad_(False)
    model(torch.ones(1, 2)).sum().backward()
    with FullyShardedDataParallel.summon_full_params(model):
        model.zero_grad()
    layers[0].requires_grad_(True)
    with model.no_sync():
        model(torch.ones(1, 2)).sum().backward()
    model(torch.ones(1, 2)).sum().backward()
    grad = layers[0].weight.grad.flatten().tolist()
    assert grad == [4] * 4, f"the gradient is {grad}, not that of two backwards: 4"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
