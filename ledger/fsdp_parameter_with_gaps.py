"""FSDP trains with other values than a parameter's if that has gaps in memory

Promised: torch docs, FullyShardedDataParallel shards the module's parameters.

Happens: flattening takes the elements from one end of the parameter's memory on, with those that
lie in its gaps; the others are lost.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
Related: https://github.com/pytorch/pytorch/pull/137382
"""
# deviations: fsdp/parameters-with-gaps
# shows: weight is

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    first, last = torch.nn.Linear(2, 1, bias=False), torch.nn.Linear(1, 4)
    first.weight = torch.nn.Parameter(torch.tensor([[1.0, -1.0, 2.0, -1.0]])[:, ::2])
    model = FSDP(torch.nn.Sequential(first, last), device_id=torch.device("cpu"))
    with FSDP.summon_full_params(model):
        weight = first.weight.tolist()
    assert weight == [[1, 2]], f"the weight is {weight}, not [[1, 2]]"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
