"""DDP with static_graph fails in the second step if the loss leaves an output out

Promised: torch docs, DistributedDataParallel, static_graph: unused parameters are supported if
they are the same in every step.

Happens: a parameter whose output the loss leaves out counts as used, and is missed in the second
step: RuntimeError.

Severity: wrong error
Taste: no
Upstream: https://github.com/pytorch/pytorch/issues/97030
"""
# deviations: ddp/static-graph/output-left-out
# shows: did not receive grad|RuntimeError

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel


class TwoOutputs(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)

    def forward(self, x):
        return self.a(x), self.b(x)


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    model = DistributedDataParallel(TwoOutputs(), static_graph=True)
    for _ in range(3):
        a, _ = model(torch.ones(1, 1))
        a.sum().backward()


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
