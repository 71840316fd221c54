"""join(divide_by_initial_world_size=False) fails on a process group that is written in Python

Promised: torch docs, join; and with divide_by_initial_world_size=True it works on such a group.

Happens: the reducer keeps the handle of Join's all_reduce without its Python half: the wait() of
the base class does not end, or "Work::getFuture not implemented".

Severity: hang
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: ddp/join/effective-world-size, ddp/join/another-division
# shows: getFuture not implemented|SIGALRM

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel


class Done(dist.Work):
    def wait(self, timeout=None):
        return True

    def get_future(self):
        future = torch.futures.Future()
        future.set_result([torch.ones(1)])
        return future


def run(rank, init_method):
    signal.alarm(10)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    model.reducer._set_forward_pass_work_handle(Done(), False)  # as Join does after an all_reduce
    model(torch.ones(1, 1)).sum().backward()


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
