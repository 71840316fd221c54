"""ZeroRedundancyOptimizer.load_state_dict empties the state that it is given

Promised: torch docs, Optimizer.load_state_dict: the state is loaded; every other optimizer leaves
it as it is, so that it can be loaded again or saved.

Happens: states of parameters of other ranks become None in the caller's dict: on each rank the
checkpoint that was read has lost a part.

Severity: silent wrong data
Taste: perhaps: it frees memory, and is done on purpose
Upstream: none found, searched in November 2026
"""
# deviations: zero/load-leaves-its-argument
# shows: are None in what was loaded

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
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    plain = torch.optim.Adam(params)
    for param in params:
        param.grad = torch.ones(2)
    plain.step()
    state = plain.state_dict()
    ZeroRedundancyOptimizer(params, torch.optim.Adam, lr=0.1).load_state_dict(state)
    lost = [place for place, value in state["state"].items() if value is None]
    assert not lost, f"the states {lost} are None in what was loaded"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
