"""DDP with static_graph fails an internal assertion if the first backward is under no_sync

Promised: torch docs, DistributedDataParallel, no_sync and static_graph: nothing forbids them
together.

Happens: the pass inside no_sync ends the recording of the graph, and the next one fails an
internal assertion.

Severity: wrong error
Taste: no
Upstream: https://github.com/pytorch/pytorch/issues/187732
"""
# deviations: ddp/static-graph/no-sync-first
# shows: RuntimeError

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    model = DistributedDataParallel(torch.nn.Linear(1, 1), static_graph=True)
    with model.no_sync():
        model(torch.ones(1, 1)).sum().backward()
    model(torch.ones(1, 1)).sum().backward()


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
