"""Ranks that name different roots or call different collectives wait until the timeout

Promised: an error that says so, as TORCH_DISTRIBUTED_DEBUG=DETAIL gives.

Happens: each rank waits for the other for the whole timeout, half an hour by default.

Severity: hang
Taste: perhaps: the documentation makes agreement the caller's duty, and DETAIL checks it
Upstream: none found, searched in November 2026
Related: https://github.com/pytorch/pytorch/issues/22071
"""
# deviations: mismatch/root
# shows: [Tt]imed out|closed by peer

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    try:
        dist.broadcast(torch.ones(2), 1 - rank)
    except RuntimeError as error:
        if "root" not in str(error):
            raise


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
