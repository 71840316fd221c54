"""convert_sync_batchnorm replaces a layer that is used twice under one name alone

Promised: torch docs, convert_sync_batchnorm: "all BatchNorm*D layers in the model" are converted.

Happens: the second name keeps the old layer; the two no longer share parameters and statistics.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: convert_sync_batchnorm/shared-layer
# shows: b is a BatchNorm1d

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    m = torch.nn.Module()
    m.a = m.b = torch.nn.BatchNorm1d(2)
    m = torch.nn.SyncBatchNorm.convert_sync_batchnorm(m)
    assert m.a is m.b, f"b is a {type(m.b).__name__}, a is a {type(m.a).__name__}"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
