"""A communication hook that returns None ends the process

Promised: torch docs, register_comm_hook: the hook returns a Future; anything else should be a
Python error.

Happens: None is taken for a future without being looked at: the process dies.

Severity: crash
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: comm_hooks/returns-none
# shows: signal SIG

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    model.register_comm_hook(None, lambda state, bucket: None)
    try:
        model(torch.ones(1, 1)).sum().backward()
    except (TypeError, RuntimeError):
        pass


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
