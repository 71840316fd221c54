"""Gloo's flight recorder shows an all_reduce where reduce_scatter_tensor was called

Promised: an entry has the operation that was called, with the sizes of its inputs and outputs.

Happens: gloo carries out reduce_scatter_tensor as an all_reduce of a buffer, and that is what is
recorded: as output, with the size of the input. Ranks that call one and the other look alike.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: flight_recorder/reduce-scatter
# shows: it is recorded as gloo:all_reduce

import pickle
import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch._C import _distributed_c10d as c10d


def run(rank, init_method):
    signal.alarm(60)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    dist.reduce_scatter_tensor(torch.ones(2), torch.ones(4))
    (entry,) = pickle.loads(c10d._dump_fr_trace())["entries"]
    name = entry["profiling_name"]
    assert "scatter" in name, f"it is recorded as {name}"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
