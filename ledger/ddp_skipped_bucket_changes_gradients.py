"""DDP divides gradients that it skips with skip_all_reduce_unused_params

Promised: a gradient that no rank used must not be touched (reducer.cpp says so); it is kept
without gradient_as_bucket_view.

Happens: with gradient_as_bucket_view it is divided before it is known that the bucket is skipped:
on 2 ranks each step halves it.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: ddp/unused/skipped-buckets-keep-gradients
# shows: gradient is

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel


class Model(torch.nn.ModuleList):
    def forward(self, x, uses):
        return sum(self[i](x) for i in uses)


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    layers = [torch.nn.Linear(1, 1, bias=False) for _ in range(2)]
    options = {"gradient_as_bucket_view": True, "skip_all_reduce_unused_params": True}
    options |= {"find_unused_parameters": True, "bucket_cap_mb": 1e-6}
    model = DistributedDataParallel(Model(layers), **options)
    for uses in ([0, 1], [0]):
        model(torch.ones(1, 1), uses).sum().backward()
    grad = layers[1].weight.grad.item()
    assert grad == 1, f"the unused gradient is {grad}, not 1"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
