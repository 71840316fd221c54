"""The message of an isend on Gloo is lost when its Work is dropped

Promised: torch.distributed docs, isend: the tensor must not be modified until the request
completes; nothing says that the handle must be kept. Handles of collectives may be dropped.

Happens: the handle's destructor frees Gloo's buffer, and the receiver waits until its timeout.

Severity: hang
Taste: no
Upstream: https://github.com/pytorch/gloo/issues/308
"""
# deviations: p2p/dropped-handles
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
    if rank == 0:
        for _ in range(10):
            dist.isend(torch.ones(1 << 20), 1)
    else:
        x = torch.zeros(1 << 20)
        for _ in range(10):
            dist.recv(x, 0)
    dist.barrier()


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
