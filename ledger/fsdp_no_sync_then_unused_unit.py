"""FSDP raises if what no_sync accumulated is followed by a backward that leaves the unit out

Promised: torch docs, no_sync: gradients are accumulated and reduced by the next backward outside;
a unit may be unused.

Happens: the unit still has an unsharded gradient at the end of the backward, which is taken for
an error.

Severity: wrong error
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: fsdp/no-sync-then-unused
# shows: Error

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import FullyShardedDataParallel


class Branches(torch.nn.ModuleList):
    def forward(self, x):
        return self[0](x), self[1](x)


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    cpu = torch.device("cpu")
    units = [FullyShardedDataParallel(torch.nn.Linear(2, 2), device_id=cpu) for _ in range(2)]
    model = FullyShardedDataParallel(Branches(units), device_id=cpu)
    with model.no_sync():
        sum(model(torch.ones(1, 2))).sum().backward()
    model(torch.ones(1, 2))[0].sum().backward()


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
