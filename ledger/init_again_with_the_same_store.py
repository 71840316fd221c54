"""The default group cannot be made again with the same store

Promised: destroy_process_group() may be followed by init_process_group(); each default group has
a prefix of its own in the store.

Happens: a rank that is early reads the addresses of the group before, and connects to nobody or
waits for nobody.

Severity: wrong error
Taste: perhaps: a fresh store is easy to have
Upstream: https://github.com/pytorch/pytorch/issues/55967
"""
# deviations: init/again-on-the-same-keys
# shows: Error
# seen: a race

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    timeout = timedelta(seconds=10)
    dist.init_process_group("gloo", init_method, timeout, 2, rank)
    dist.destroy_process_group()
    store = dist.FileStore(init_method[7:] + "2", 2)
    for _ in range(20):
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)
        dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
