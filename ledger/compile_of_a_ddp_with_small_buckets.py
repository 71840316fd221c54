"""A DDP whose bucket_cap_mb is below 1 cannot be compiled

Promised: torch, DistributedDataParallel: bucket_cap_mb sizes buckets, and torch.compile of a DDP
cuts graphs at their ends.

Happens: DDPOptimizer asserts that no bucket is smaller than the default size of the first one. DDP
itself does not: with bucket_cap_mb=0.5 it trains, and raises when it is compiled.

Severity: wrong error
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: compile/ddp/small-buckets
# shows: First bucket should be smaller/equal to other buckets

import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

if __name__ == "__main__":
    store = f"file://{tempfile.mkdtemp()}/store"
    dist.init_process_group("gloo", store, timedelta(seconds=10), 1, 0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2), bucket_cap_mb=0.5)
    try:
        torch.compile(model, backend="eager")(torch.ones(1, 2)).sum().backward()
    except AssertionError as error:
        raise SystemExit(f"wrong: {error}") from None
    print("as promised")
