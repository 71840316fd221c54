"""A message that is longer than the receiver's tensor ends the receiver's process

Promised: torch.distributed docs, recv: an error, as any other mismatch that the backend notices.

Happens: Gloo throws EnforceNotMet in its loop thread, where nobody catches it: SIGABRT.

Severity: crash
Taste: no
Upstream: https://github.com/pytorch/gloo/pull/456
"""
# deviations: p2p/longer-message
# shows: signal SIGABRT

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
        dist.send(torch.ones(8), 1) if rank == 0 else dist.recv(torch.ones(4), 0)
        dist.barrier()
    except RuntimeError:
        pass


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
