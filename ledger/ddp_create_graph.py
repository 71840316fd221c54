"""backward(create_graph=True) through DDP raises if there are two parameters

Promised: backward(create_graph=True) works without DDP, and with DDP of one parameter.

Happens: the second gradient is written into a bucket that the first has made part of the graph:
RuntimeError.

Severity: wrong error
Taste: perhaps: the documentation says that DDP works with one backward through autograd alone
Upstream: https://github.com/pytorch/pytorch/issues/63929
"""
# deviations: ddp/backward/create-graph-of-several-parameters
# shows: RuntimeError

import signal
import tempfile
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    warnings.simplefilter("ignore")  # backward with create_graph leaks, it says
    layers = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Tanh(), torch.nn.Linear(2, 1))
    model = DistributedDataParallel(layers)
    model(torch.ones(1, 3)).pow(2).sum().backward(create_graph=True)
    layers[0].weight.grad.sum().backward()


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
