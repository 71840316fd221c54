"""FSDP unties a parameter that two units share, without a word

Promised: an error, or one parameter; torch docs, FullyShardedDataParallel, say that shared
parameters must be in the same unit, which is not checked.

Happens: each unit gets a parameter of its own, and they drift apart.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: fsdp/tied-across-units
# shows: elements

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
    cpu = torch.device("cpu")
    m = torch.nn.Sequential(*(torch.nn.Linear(2, 2, bias=False) for _ in range(2)))
    m[0].weight = m[1].weight
    try:
        m[0] = FullyShardedDataParallel(m[0], device_id=cpu)
        model = FullyShardedDataParallel(m, device_id=cpu)
    except ValueError:
        raise SystemExit from None
    count = 2 * sum(p.numel() for p in model.parameters())
    assert count == 4, f"one weight of 4 elements became {count} elements"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
