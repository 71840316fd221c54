"""FSDP.optim_state_dict with a group without rank 0 raises

Promised: torch docs, optim_state_dict, group: the ranks of the group take part.

Happens: names are broadcast from the global rank 0, which is not in the group: "Global rank 0 is
not part of group".

Severity: wrong error
Taste: no
Upstream: https://github.com/pytorch/pytorch/issues/155680
"""
# deviations: fsdp/optimizer-state-in-a-group
# shows: Global rank 0 is not part of group

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import FullyShardedDataParallel


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 3, rank)
    group = dist.new_group([1, 2])
    if rank > 0:
        module = torch.nn.Linear(2, 2)
        model = FullyShardedDataParallel(module, process_group=group, device_id=torch.device("cpu"))
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        FullyShardedDataParallel.optim_state_dict(model, optimizer, group=group)


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 3, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
