"""Benchmark: time of synchronised batch norm against plain batch norm on the same rank.

Times forward and backward of both layers on 2 ranks with one thread each, by turns, in one run: the
ranks meet before every turn, so that both layers find the machine alike. A turn lasts as long as
its slower rank. Prints, for each backend, medians over all turns with the median of the ratios of
neighbouring turns; the ratio of the quickest turns, which others on the machine disturbed least;
and the ratio of processor time, threads of the backend included, which leaves out all waiting.
torch's SyncBatchNorm is no competitor here, since it refuses CPU tensors.

    python -m ci.bench_sync_batchnorm [--turns 100] [--rounds 3] [--shape 32,64,28,28]
                                      [--backends pygloo,gloo]
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conformance.harness.me import Me
from conformance.harness.pool import Pool, WorldSpec
from conformance.harness.ranks import Ranks
from conformance.target import Target
from impl.sync_batchnorm import SyncBatchNorm

WORLD_SIZE = 2
RATIO_MAX = 1.4  # what the project promises

TARGETS = {
    "pygloo": Target("pygloo", "pygloo", imports=("impl.gloo",)),
    "gloo": Target("gloo", "gloo"),
}


@dataclass(frozen=True, slots=True)
class Pass:
    """Forward and backward of one layer.

    processor_s: of all threads of the rank's process.
    """

    wall_s: float
    processor_s: float


@dataclass(frozen=True, slots=True)
class Turn:
    """Both layers, one after the other."""

    plain: Pass
    synchronised: Pass


def time_turns(me: Me, shape: Sequence[int], turns: int) -> list[Turn]:
    """Both layers by turns, on a batch of this shape; the first turns warm up and do not count."""
    x = torch.randn(tuple(shape)).requires_grad_()
    dy = torch.randn(tuple(shape))
    plain, synchronised = nn.BatchNorm2d(shape[1]), SyncBatchNorm(shape[1])
    timed = [Turn(_time(plain, x, dy), _time(synchronised, x, dy)) for _ in range(turns + 3)]
    return timed[3:]


def _time(layer: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor) -> Pass:
    x.grad = None
    dist.barrier()
    started_s, spent_s = time.perf_counter(), time.process_time()
    layer(x).backward(dy)
    return Pass(time.perf_counter() - started_s, time.process_time() - spent_s)


def measure(pool: Pool, target: Target, shape: Sequence[int], turns: int) -> list[list[Turn]]:
    """The turns of every rank."""
    spec = WorldSpec(
        target=target,
        world_size=WORLD_SIZE,
        device="cpu",
        seed=1,
        default_group=True,
        group_timeout_s=300.0,
        search_path=(),
    )
    ranks = Ranks(pool, spec, deadline_s=600.0)
    # By name, so that ranks find the function in this module and not in __main__.
    here = import_module("ci.bench_sync_batchnorm")
    timed: list[list[Turn]] = ranks.run(here.time_turns, tuple(shape), turns)
    ranks.renew()
    return timed


def summary(timed: Sequence[Sequence[Turn]]) -> str:
    """One line about the turns of all ranks."""
    turns = list(zip(*timed, strict=True))
    plain = [max(turn.plain.wall_s for turn in ranks) for ranks in turns]
    synchronised = [max(turn.synchronised.wall_s for turn in ranks) for ranks in turns]
    ratio = statistics.median(s / p for s, p in zip(synchronised, plain, strict=True))
    work = [turn for ranks in turns for turn in ranks]
    processor = statistics.median(
        turn.synchronised.processor_s for turn in work
    ) / statistics.median(turn.plain.processor_s for turn in work)
    return (
        f"plain {1000 * statistics.median(plain):6.2f} ms   "
        f"synchronised {1000 * statistics.median(synchronised):6.2f} ms   "
        f"{ratio:.2f} times   quickest {min(synchronised) / min(plain):.2f} times   "
        f"processor time {processor:.2f} times"
    )


def parsed(arguments: Sequence[str] | None) -> Any:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shape", default="32,64,28,28")
    parser.add_argument("--backends", default="pygloo,gloo")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parsed(arguments)
    shape = [int(size) for size in options.shape.split(",")]
    print(
        f"forward and backward of {tuple(shape)} on {WORLD_SIZE} ranks, one thread each; medians "
        f"of {options.turns} turns; promised: at most {RATIO_MAX} times plain batch norm"
    )
    with contextlib.closing(Pool()) as pool:
        for number in range(options.rounds):
            for backend in options.backends.split(","):
                timed = measure(pool, TARGETS[backend], shape, options.turns)
                print(f"round {number + 1}  {backend:<7} {summary(timed)}", flush=True)


if __name__ == "__main__":
    main()
