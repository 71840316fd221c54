"""ZeroRedundancyOptimizer.consolidate_state_dict to a rank that is not there is taken

Promised: torch docs, consolidate_state_dict, to: the rank that receives the optimizer states;
collectives with a root refuse one that the group does not have.

Happens: the states are broadcast, each rank throws them away, and no error is raised; the
checkpoint is missed later, when state_dict raises.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: zero/no-such-rank
# shows: state of rank 2 of 2 was consolidated

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.optim import ZeroRedundancyOptimizer


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = ZeroRedundancyOptimizer([param], torch.optim.SGD, lr=0.1)
    try:
        optimizer.consolidate_state_dict(to=2)
    except Exception:
        return
    raise AssertionError("the state of rank 2 of 2 was consolidated")


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
