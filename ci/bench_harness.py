"""Benchmark: time of one multi-rank case in this harness and in torch's own test harness.

Runs the same two cases, one that does nothing and one all_reduce, on 4 ranks with torch's gloo:
once on the warm ranks of this project and once in torch's MultiProcessTestCase, by turns. Prints
medians and their ratio. This is the only place of the project that looks at torch's private test
modules.

    python -m ci.bench_harness [ROUNDS]
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
import unittest
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcessTestCase

from conformance.harness.me import Me
from conformance.harness.pool import Pool, WorldSpec
from conformance.harness.ranks import Ranks
from conformance.target import load_target

WORLD_SIZE = 4


def nothing(me: Me) -> None:
    pass


def all_reduce(me: Me) -> torch.Tensor:
    x = torch.full((5,), float(me.rank + 1))
    dist.all_reduce(x)
    return x


class TorchsOwn(MultiProcessTestCase):
    """The same cases, as torch's tests are written."""

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    @property
    def world_size(self) -> int:
        return WORLD_SIZE

    def _join_group(self) -> None:
        store = dist.FileStore(self.file_name, WORLD_SIZE)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=WORLD_SIZE)

    def test_nothing(self) -> None:
        self._join_group()
        dist.destroy_process_group()

    def test_all_reduce(self) -> None:
        self._join_group()
        x = torch.full((5,), float(self.rank + 1))
        dist.all_reduce(x)
        assert torch.equal(x, torch.full((5,), 10.0))
        dist.destroy_process_group()


def time_torchs_own(name: str) -> float:
    started = time.perf_counter()
    result = unittest.TestResult()
    TorchsOwn(name)(result)
    if not result.wasSuccessful():
        raise SystemExit(f"{name} failed: {result.errors or result.failures}")
    return time.perf_counter() - started


def time_warm(pool: Pool, function: Callable[[Me], Any]) -> float:
    spec = WorldSpec(
        target=load_target("torch"),
        world_size=WORLD_SIZE,
        device="cpu",
        seed=1,
        default_group=True,
        group_timeout_s=60.0,
        search_path=tuple(sys.path),
    )
    started = time.perf_counter()
    ranks = Ranks(pool, spec, deadline_s=60.0)
    ranks.run(function)
    ranks.renew()
    return time.perf_counter() - started


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    # By name, so that warm ranks find the functions in this module and not in __main__.
    module = import_module("ci.bench_harness")
    with contextlib.closing(Pool()) as pool:
        time_warm(pool, module.nothing)
        print(f"one case on {WORLD_SIZE} ranks, medians of {rounds} rounds by turns")
        for case in ("nothing", "all_reduce"):
            warm, own = [], []
            for _ in range(rounds):
                warm.append(time_warm(pool, getattr(module, case)))
                own.append(time_torchs_own(f"test_{case}"))
            ours_ms, theirs_ms = (1000 * statistics.median(times) for times in (warm, own))
            print(
                f"{case:<12} warm ranks {ours_ms:8.1f} ms   "
                f"MultiProcessTestCase {theirs_ms:8.1f} ms   "
                f"{theirs_ms / ours_ms:6.1f} times faster"
            )


if __name__ == "__main__":
    main()
