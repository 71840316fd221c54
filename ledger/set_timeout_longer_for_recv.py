"""set_timeout does not lengthen the timeout of recv

Promised: ProcessGroup.set_timeout: "Sets the default timeout for all future operations."

Happens: recv has the timeout that the group was made with, and gives up too early.

Severity: wrong error
Taste: no
Upstream: none found, searched in November 2026
Related: https://github.com/pytorch/pytorch/issues/165422
"""
# deviations: timeouts/lengthened-for-messages
# shows: [Tt]imed out waiting 4000ms

import signal
import tempfile
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=4), 2, rank)
    dist.all_reduce(torch.ones(1))
    dist.group.WORLD.set_timeout(timedelta(seconds=60))
    if rank == 0:
        dist.recv(torch.ones(1), 1)
    else:
        time.sleep(6)
        dist.send(torch.ones(1), 0)


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
