"""SyncBatchNorm has no argument bias before torch 2.12

Promised: torch 2.12 docs, SyncBatchNorm, bias.

Happens: TypeError with earlier versions.

Severity: missing
Taste: yes: a feature that came later
Upstream: none known
"""
# deviations: sync_batchnorm/no-bias
# shows: TypeError

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    assert torch.nn.SyncBatchNorm(2, bias=False).bias is None


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
