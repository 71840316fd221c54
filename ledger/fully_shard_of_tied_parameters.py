"""fully_shard takes a parameter that two units share into both, without a word

Promised: a parameter is managed by one unit; later versions refuse one that two share.

Happens: both units have a shard of their own, which the optimizer moves in its own way: the layers
are no longer tied.

Severity: silent wrong data
Taste: no
Upstream: https://github.com/pytorch/pytorch/pull/176225
"""
# deviations: fully_shard/tied-across-units
# shows: are not tied

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    model = torch.nn.Sequential(*[torch.nn.Linear(2, 2, bias=False) for _ in range(2)])
    model[1].weight = model[0].weight
    try:
        for module in (*model, model):
            fully_shard(module)
        model(torch.ones(1, 2)).sum().backward()
    except ValueError:
        return  # refused
    grads = [layer.weight.grad.to_local().clone() for layer in model]
    assert torch.equal(*grads), f"layers of one weight are not tied: {grads}"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="spawn")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
