"""The gradient of nn.functional.reduce_scatter by AVG is that of a sum

Promised: the gradient of an average of two ranks is half of that of a sum; all_reduce of the same
module has it right or refuses.

Happens: each element of the gradient is 1, not 0.5, without a word.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: autograd/average-in-parts
# shows: gradient is 1.0

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as nn
import torch.multiprocessing as mp


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    xs = [torch.ones(1, requires_grad=True) for _ in range(2)]
    y = nn.reduce_scatter(torch.zeros(1), xs, dist.ReduceOp.AVG)
    y.sum().backward()
    assert xs[0].grad.item() == 0.5, f"the gradient is {xs[0].grad.item()}"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
