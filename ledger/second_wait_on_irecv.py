"""A second wait() on the Work of an irecv or isend waits for a second message

Promised: torch.distributed docs, Work.wait: waits for the operation, which is over. The Work of
every collective returns at once.

Happens: the second call waits for another message until the timeout, and fails.

Severity: hang
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: p2p/wait-twice
# shows: [Tt]imed out

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
        dist.send(torch.ones(1), 1)
    else:
        work = dist.irecv(torch.zeros(1), 0)
        work.wait()
        work.wait()
    dist.barrier()


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
