"""A group whose last reference is held by a future's callback aborts the process

Promised: a callback may hold the group that it uses, as DDP's PowerSGD hook does.

Happens: the group is destroyed in one of its own threads, which it joins: the process aborts.

Severity: crash
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: groups/last-held-by-a-callback
# shows: signal SIGABRT

import functools
import signal
import tempfile
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def size_later(group, future):
    time.sleep(0.5)
    return group.size()


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    for _ in range(5):
        group = dist.new_group()
        future = dist.all_reduce(torch.ones(1), group=group, async_op=True).get_future()
        size = future.then(functools.partial(size_later, group))
        dist.destroy_process_group(group)
        del group, future
        size.wait()
        time.sleep(0.5)


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
