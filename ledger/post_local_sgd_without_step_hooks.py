"""PostLocalSGDOptimizer takes no step hooks

Promised: torch docs, Optimizer.register_step_post_hook: for every optimizer; PostLocalSGDOptimizer
is a subclass.

Happens: its constructor does not call Optimizer's, so the methods are there and what they need is
not: AttributeError. `defaults`, and schedulers that read them, are missing as well.

Severity: missing
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: local_sgd/step-hooks
# shows: has no attribute '_optimizer_step_post_hooks'

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    local = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    optimizer = PostLocalSGDOptimizer(local, PeriodicModelAverager(period=2))
    optimizer.register_step_post_hook(lambda *_: None)


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
