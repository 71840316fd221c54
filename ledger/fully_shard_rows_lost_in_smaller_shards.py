"""fully_shard with reshard_after_forward=2 shows padding in the place of a row

Promised: torch docs, fully_shard, reshard_after_forward: with an int, parameters are resharded to
that many ranks after the forward; what modules have then are DTensors of the parameter.

Happens: the smaller parts are cut from the whole as all ranks have padded it. Five rows on four
ranks are padded to eight, so each of two parts has four, of which the DTensor shows the first
three and the first two: row 4 is nowhere, and a row of padding is shown as the last one.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: fully_shard/smaller-uneven-shards
# shows: between forward and backward

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 4, rank)
    mesh, layer = dist.init_device_mesh("cpu", (4,)), torch.nn.Linear(1, 5, bias=False)
    layer.weight.data.copy_(torch.arange(1.0, 6.0).view(5, 1))
    fully_shard(layer, mesh=mesh, reshard_after_forward=2)
    fully_shard(torch.nn.Sequential(layer), mesh=mesh)(torch.ones(1, 1))
    seen = layer.weight.full_tensor().flatten().tolist()
    assert seen == [1, 2, 3, 4, 5], f"{seen} between forward and backward"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 4, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
