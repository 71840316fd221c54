"""fully_shard fails in the backward if a parameter has no elements

Promised: torch docs, fully_shard: parameters of any size are divided as torch.chunk does; shards
may be empty, and such a parameter is sharded and gathered.

Happens: the gradients of a unit are laid out by _chunk_cat, which refuses tensors without
elements: RuntimeError in the backward, so that no parameter of the unit gets a gradient.

Severity: missing
Taste: perhaps: a parameter without elements trains nothing, and stands in few models
Upstream: none found, searched in November 2026
"""
# deviations: fully_shard/no-rows
# shows: _chunk_cat

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    model = torch.nn.Linear(3, 2)
    model.empty = torch.nn.Parameter(torch.ones(0, 3))
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (2,)))
    (model(torch.ones(1, 3)).sum() + model.empty.sum()).backward()


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
