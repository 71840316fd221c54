"""FSDP with NO_SHARD and use_orig_params loses the parameters of an unused unit

Promised: a unit without gradients takes no part in the step, and its parameters are still the
model's; with FULL_SHARD it is so.

Happens: this project's cases see that the unit shows plain tensors where parameters were
afterwards. This script, with torch alone, does not show it yet.

Severity: silent wrong data
Taste: no
Upstream: none known
"""
# deviations: fsdp/unused-replicated-unit
# shows: parameters are

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy


class Branches(torch.nn.ModuleList):
    def forward(self, x):
        return self[0](x), self[1](x)


def wrap(module):
    options = {"use_orig_params": True, "device_id": torch.device("cpu")}
    return FullyShardedDataParallel(module, sharding_strategy=ShardingStrategy.NO_SHARD, **options)


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    layers = [wrap(torch.nn.Linear(2, 2)) for _ in range(2)]
    model = wrap(Branches(layers))
    for step in range(2):
        a, b = model(torch.ones(1, 2))
        (a.sum() + (b.sum() if step == 0 else 0)).backward()
        model.zero_grad()
    kind = type(layers[1].weight).__name__
    assert kind == "Parameter", f"parameters are of type {kind} afterwards"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
