"""DDP with find_unused_parameters hangs if a rank uses no parameter at all

Promised: torch docs, DistributedDataParallel, find_unused_parameters: parameters that do not take
part are marked as ready.

Happens: no hook fires on that rank, so it reduces nothing, and the others wait for it.

Severity: hang
Taste: no
Upstream: https://github.com/pytorch/pytorch/issues/40566
"""
# deviations: ddp/unused/nothing-used-on-a-rank
# shows: [Tt]imed out|closed by peer|SIGALRM

import signal
import tempfile
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel


class Model(torch.nn.Linear):
    def forward(self, x, is_used):
        return super().forward(x) if is_used else 2 * x


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    model = DistributedDataParallel(Model(1, 1), find_unused_parameters=True)
    x = torch.ones(1, 1, requires_grad=True)
    model(x, rank == 0).sum().backward()
    time.sleep(12 * rank)


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
