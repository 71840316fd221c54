"""MIN and MAX lose a NaN or keep it depending on which rank has it

Promised: torch.maximum, amax and NumPy propagate NaN; the ranks should at least agree with
themselves.

Happens: on Gloo a comparison with NaN is false, so the result depends on the order of the ranks.

Severity: silent wrong data
Taste: perhaps: MPI leaves NaN open; but the result changes with the rank that has it
Upstream: none found, searched in November 2026
"""
# deviations: reductions/nan-in-min-max
# shows: MAX is

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    found = []
    for place in range(2):
        x = torch.tensor([torch.nan if rank == place else 1.0])
        dist.all_reduce(x, dist.ReduceOp.MAX)
        found.append(x.item())
    assert all(torch.isnan(torch.tensor(found))), f"MAX is {found}, by the rank of the NaN"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
