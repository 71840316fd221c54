"""FSDP evaluates with the parameters from before the optimizer's step

Promised: a forward computes with the parameters as they are.

Happens: parameters that a forward under no_grad has gathered are kept, and used after
optimizer.step() in the next forward under no_grad.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: fsdp/step-after-eval
# shows: outputs are

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import FullyShardedDataParallel


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    x = torch.ones(1, 2)
    model(x).sum().backward()
    with torch.no_grad():
        before = model(x).item()
        optimizer.step()
        after = model(x).item()
    assert (before, after) == (2, 0), f"outputs are {before} before and {after} after, not 2 and 0"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
