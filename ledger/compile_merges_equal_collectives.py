"""torch.compile merges two calls of a collective that have the same input

Promised: torch docs, collectives: each rank of a group calls each collective. A rank that passes
the same tensor to two of them calls two.

Happens: where a graph is partitioned for a backward, AOTAutograd takes the second call for a copy
of the first one, and issues one. A rank whose inputs are two tensors issues two, and waits.

Severity: hang
Taste: perhaps: programs whose ranks all pass equal inputs are better off with one call
Upstream: none found, searched in November 2026
Related: https://github.com/pytorch/pytorch/issues/146045
"""
# deviations: compile/equal-inputs
# shows: all_reduce was called once, and not twice

import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.profiler import profile


def summed(x, other, weight):
    first = functional.all_reduce(x, "sum", dist.group.WORLD)
    second = functional.all_reduce(other, "sum", dist.group.WORLD)
    return (first * 2 + second) * weight


def calls(function):
    """In a group of one rank, so that nothing hangs."""
    x, weight = torch.ones(2), torch.ones(2, requires_grad=True)
    with profile() as seen:
        function(x, x, weight)
    return sum(e.count for e in seen.key_averages() if e.key == "_c10d_functional::all_reduce")


if __name__ == "__main__":
    store = f"file://{tempfile.mkdtemp()}/store"
    dist.init_process_group("gloo", store, timedelta(seconds=10), 1, 0)
    compiled = torch.compile(summed, backend="aot_eager")
    calls(compiled)  # compiles
    if calls(compiled) != calls(summed):
        raise SystemExit("wrong: all_reduce was called once, and not twice")
    print("as promised")
