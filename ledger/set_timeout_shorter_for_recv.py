"""set_timeout does not shorten the timeout of recv

Promised: ProcessGroup.set_timeout: "Sets the default timeout for all future operations."

Happens: recv has the timeout that the group was made with, here 10 s.

Severity: hang
Taste: no
Upstream: none found, searched in November 2026
Related: https://github.com/pytorch/pytorch/issues/165422
"""
# deviations: timeouts/shortened-for-messages
# shows: after [0-9]+ s

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
    dist.group.WORLD.set_timeout(timedelta(seconds=1))
    start = time.monotonic()
    if rank == 0:
        try:
            dist.recv(torch.ones(1), 1)
        except RuntimeError:
            took_s = time.monotonic() - start
            assert took_s < 6, f"recv gave up after {took_s:.0f} s"
    else:
        time.sleep(13)


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
