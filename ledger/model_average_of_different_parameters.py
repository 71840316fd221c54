"""Model averaging averages a parameter with another one

Promised: torch docs of PeriodicModelAverager: averages the parameters of a model.

Happens: each rank leaves out what has no gradient there and sends the rest as one tensor. If two
ranks used different parameters of one size, each is averaged with the other, without an error.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
Related: https://github.com/pytorch/pytorch/pull/74894
"""
# deviations: averaging/gradients-on-some-ranks
# shows: 15.0

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    params = [torch.nn.Parameter(torch.tensor([value])) for value in (10.0, 20.0)]
    params[rank].grad = torch.ones(1)  # a model of which each rank has used another branch
    PeriodicModelAverager(period=2).average_parameters(params)
    got = [param.item() for param in params]
    assert got == [10.0, 20.0], f"10 and 20 on both ranks, they became {got}"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
