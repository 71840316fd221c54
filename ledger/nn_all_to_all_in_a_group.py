"""torch.distributed.nn.functional.all_to_all fails on Gloo in a group that is not the world

Promised: torch.distributed.nn.functional.all_to_all takes group=.

Happens: on Gloo it is made of scatters, whose global sources are taken from ranks in the group:
"Global rank 0 is not part of group".

Severity: wrong error
Taste: no
Upstream: none found, searched in November 2026
Related: https://github.com/pytorch/pytorch/issues/120213
"""
# deviations: autograd/lists-in-groups
# shows: Global rank 0 is not part of group

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as nn
import torch.multiprocessing as mp


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 3, rank)
    group = dist.new_group([1, 2])
    if rank > 0:
        x = [torch.ones(1, requires_grad=True) for _ in range(2)]
        nn.all_to_all([torch.zeros(1) for _ in range(2)], x, group)


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 3, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
