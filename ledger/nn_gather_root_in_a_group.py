"""nn.functional.gather compares a global root with the rank in the group

Promised: torch.distributed.nn.functional.gather: dst is a rank like that of
torch.distributed.gather, a global one.

Happens: in a group of ranks 1 and 2 with dst=2: "gather_list must be specified on destination
rank".

Severity: wrong error
Taste: no
Upstream: none found, searched in November 2026
Related: https://github.com/pytorch/pytorch/issues/120213
"""
# deviations: autograd/roots-in-groups
# shows: must be specified on destination rank

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
        nn.gather(torch.ones(1), 2, group)


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 3, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
