"""GradBucket.index() is 0 for all buckets in the first step of a static graph

Promised: torch docs, GradBucket.index and is_last: buckets are numbered, and the last one says
so.

Happens: in the first step of a static graph each bucket has index 0, and none is the last.
PowerSGD counts its iterations by it.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: comm_hooks/bucket/index-of-a-static-graph
# shows: seen are

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel


def hook(seen, bucket):
    seen.append((bucket.index(), bucket.is_last()))
    return allreduce_hook(dist.group.WORLD, bucket)


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    parts = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1).double()
    model = torch.nn.ModuleList(parts)
    model.forward = lambda x: parts[0](x) + parts[1](x.double())
    model = DistributedDataParallel(model, static_graph=True)
    seen = []
    model.register_comm_hook(seen, hook)
    model(torch.ones(1, 1)).sum().backward()
    assert sorted(seen) == [(0, False), (1, True)], f"indices seen are {seen}"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
