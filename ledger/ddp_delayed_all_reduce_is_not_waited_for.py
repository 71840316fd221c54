"""DDP's delayed all_reduce is not finished when backward returns

Promised: DistributedDataParallel, delay_all_reduce_named_params: gradients are averaged when
backward returns, as all others are.

Happens: the all_reduce of the delayed gradients is not waited for: they are each rank's own until
it is over.
It is a race: wrong in 4 of 5 runs with torch 2.13 on two cores.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: ddp/gradients/delayed
# shows: gradient is
# seen: a race

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
    m = torch.nn.Module()
    m.small, m.large = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.zeros(1 << 22))
    m.forward = lambda x: ((m.large + m.small) * x).sum()
    names = [("large", m.large)]
    model = DistributedDataParallel(
        m, delay_all_reduce_named_params=names, param_to_hook_all_reduce=m.small
    )
    for _ in range(10):
        model.zero_grad()
        model(torch.tensor(1.0 + 2 * rank)).backward()
        grads = m.large.grad[:: 1 << 16].unique().tolist()
        dist.barrier()
        assert grads == [2], f"a gradient is {grads}, not 2"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
