"""FSDP wraps a module that another instance has wrapped, without a word

Promised: an error, as auto wrapping gives: "FSDP auto wrapping requires modules to not already
have FSDP applied".

Happens: the second instance finds no parameters to shard.

Severity: silent wrong data
Taste: perhaps: wrapping twice is a mistake, and the first forward fails
Upstream: none known
"""
# deviations: fsdp/wrapped-twice
# shows: not a word

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
    module = torch.nn.Linear(2, 2)
    FullyShardedDataParallel(module, device_id=torch.device("cpu"))
    try:
        FullyShardedDataParallel(module, device_id=torch.device("cpu"))
    except ValueError:
        pass
    else:
        raise AssertionError("not a word")


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
