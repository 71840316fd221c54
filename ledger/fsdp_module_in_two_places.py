"""FSDP with an auto_wrap_policy breaks a module that is in two places

Promised: a module under two names is one unit, and both names hold it; the bare module runs.

Happens: the first place gets the wrapped module, the other keeps the bare one, whose parameters
are gone.

Severity: wrong error
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: fsdp/shared-module
# shows: b is a

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import always_wrap_policy


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    m = torch.nn.Module()
    m.a = m.b = torch.nn.Linear(2, 2)
    cpu = torch.device("cpu")
    FullyShardedDataParallel(m, auto_wrap_policy=always_wrap_policy, device_id=cpu)
    assert m.a is m.b, f"b is a {type(m.b).__name__}, a is a {type(m.a).__name__}"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
