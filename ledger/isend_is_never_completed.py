"""The Work of an isend or irecv on Gloo is not completed until wait() is called

Promised: torch.distributed docs, "Work": is_completed() is true once the operation has finished.

Happens: polling is_completed() never ends, though the message was delivered.

Severity: hang
Taste: no
Upstream: https://github.com/pytorch/pytorch/issues/30723
"""
# deviations: p2p/completes-without-wait
# shows: not completed after 3 s

import signal
import tempfile
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    x = torch.zeros(1)
    work = dist.irecv(x, 1 - rank, tag=1) if rank else dist.isend(torch.ones(1), 1 - rank, tag=1)
    end = time.monotonic() + 3
    while not work.is_completed() and time.monotonic() < end:
        time.sleep(0.01)
    assert work.is_completed(), f"not completed after 3 s; x is {x.tolist()}"
    dist.barrier()


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
