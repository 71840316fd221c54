"""broadcast_buffers of DistributedDataParallel is not deprecated before torch 2.13

Promised: torch 2.13 warns that broadcast_buffers is deprecated.

Happens: no warning with earlier versions.

Severity: missing
Taste: yes: a deprecation that came later
Upstream: none known
"""
# deviations: ddp/buffers/broadcast-buffers
# shows: no warning

import signal
import tempfile
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        DistributedDataParallel(torch.nn.Linear(2, 2), broadcast_buffers=False)
    assert any("broadcast_buffers" in str(one.message) for one in caught), "no warning"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
