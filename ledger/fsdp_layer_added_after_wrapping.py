"""A layer that is added after fully_shard trains on each rank alone, without a word

Promised: a module under fully_shard, or in FullyShardedDataParallel, trains as one process does.

Happens: a layer that is added before the first forward is not sharded, and its gradients stay
local; nothing is said, and the ranks' models part.

Severity: silent wrong data
Taste: perhaps: nothing promises that a module may change after it was wrapped
Upstream: none found, searched in November 2026
"""
# deviations: fsdp/added-layer
# shows: gradient is

import signal
import tempfile
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    warnings.simplefilter("error")
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    mesh = init_device_mesh("cpu", (2,))
    model = fully_shard(torch.nn.Sequential(torch.nn.Linear(2, 2)), mesh=mesh)
    model.append(torch.nn.Linear(2, 1, bias=False))
    model(torch.ones(1, 2)).mul(1 + 2 * rank).sum().backward()
    grads = [None, None]
    dist.all_gather_object(grads, model[1].weight.grad.norm().item())
    assert grads[0] == grads[1], f"the gradient is {grads[0]:.3} on rank 0, {grads[1]:.3} on rank 1"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
