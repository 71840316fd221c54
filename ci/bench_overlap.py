"""Benchmark: how far an asynchronous all_reduce overlaps with computation, `impl` and torch's gloo.

Two ranks, one thread each: 25 MiB are reduced, matrices are multiplied, and both at once. Prints
the medians, and what both at once take as a part of what they take one after the other, for
`impl` and for torch's gloo by turns.

    python -m ci.bench_overlap [ROUNDS]
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from importlib import import_module

import torch
import torch.distributed as dist

from conformance.bench.collectives import make_group
from conformance.bench.command import fresh_ranks
from conformance.harness.me import Me
from conformance.target import Target, load_target

NUMEL = 25 * (1 << 20) // 4
EDGE = 512

Times = tuple[float, float, float]  # reduce, compute, both; seconds


def measure(me: Me, targets: list[Target], rounds: int) -> list[list[Times]]:
    """This rank's times: [target][round]."""
    groups = [make_group(me, target) for target in targets]
    x = torch.ones(NUMEL)
    seen: list[list[Times]] = [[] for _ in targets]
    for _ in range(rounds):
        for group, times in zip(groups, seen, strict=True):
            times.append(one_round(group, x))
    return seen


def one_round(group: dist.ProcessGroup, x: torch.Tensor) -> Times:
    a, b, product = (torch.rand(EDGE, EDGE) for _ in range(3))

    def reduce() -> None:
        dist.all_reduce(x, group=group)

    def multiply() -> None:
        torch.mm(a, b, out=product)

    # as much to compute as there is to reduce; the same on every rank
    wanted = torch.tensor(timed(reduce) / timed(multiply))
    dist.all_reduce(wanted, dist.ReduceOp.MAX)
    count = max(1, round(wanted.item()))

    def compute() -> None:
        for _ in range(count):
            multiply()

    def both() -> None:
        work = dist.all_reduce(x, group=group, async_op=True)
        compute()
        assert work is not None
        work.wait()

    return timed(reduce), timed(compute), timed(both)


def timed(act: Callable[[], None]) -> float:
    """Seconds, from when all ranks are ready."""
    dist.barrier()
    started_s = time.perf_counter()
    act()
    return time.perf_counter() - started_s


def main() -> None:
    """Measure and print."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    targets = [load_target("impl"), load_target("torch")]
    # by name, so that warm ranks find the function in this module and not in __main__
    function = import_module("ci.bench_overlap").measure
    with fresh_ranks(2, "cpu") as ranks:
        by_rank = ranks.run(function, targets, rounds)
    for index, target in enumerate(targets):
        slowest = [
            tuple(max(one) for one in zip(*of_round, strict=True))
            for of_round in zip(*(rank[index] for rank in by_rank), strict=True)
        ]
        reduce_s, compute_s, both_s = (
            statistics.median(column) for column in zip(*slowest, strict=True)
        )
        part = statistics.median(both / (one + other) for one, other, both in slowest)
        print(
            f"{target.name:6} reduce {reduce_s * 1e3:6.1f} ms  compute {compute_s * 1e3:6.1f} ms  "
            f"both {both_s * 1e3:6.1f} ms = {part:.2f} of the sum"
        )


if __name__ == "__main__":
    main()
