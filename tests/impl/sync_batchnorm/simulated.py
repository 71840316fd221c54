"""SyncBatchNorm on ranks that are threads of one process, with exchanges but no backend."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from impl.sync_batchnorm import SyncBatchNorm

T = TypeVar("T")

DEADLINE_S = 30.0


@dataclass
class RankExchange:
    """One rank's end of a simulated group; it notes the collectives that it was asked for."""

    rank: int
    slots: list[Tensor]  # shared; one per rank
    barrier: threading.Barrier  # shared
    calls: list[str] = field(default_factory=list)

    def all_gather(self, message: Tensor) -> Tensor:
        self.calls.append("all_gather")
        return self._collect(message)

    def all_reduce(self, vector: Tensor) -> Tensor:
        self.calls.append("all_reduce")
        return self._collect(vector).sum(dim=0)

    def _collect(self, message: Tensor) -> Tensor:
        self.slots[self.rank] = message.clone()
        self.barrier.wait()
        collected = torch.stack(self.slots)
        self.barrier.wait()  # no rank overwrites a slot before all have read it
        return collected


class SimulatedLayer(SyncBatchNorm):
    """SyncBatchNorm in a simulated group."""

    exchange: RankExchange

    def _exchange(self) -> RankExchange:
        return self.exchange


def run_ranks(world_size: int, body: Callable[[RankExchange], T]) -> list[T]:
    """What body returns on each rank; the first rank's own error, if one raises."""
    slots = [torch.empty(0)] * world_size
    barrier = threading.Barrier(world_size, timeout=DEADLINE_S)
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = body(RankExchange(rank, slots, barrier))
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Ranks that waited for the one that failed have only a broken barrier to report.
    errors.sort(key=lambda error: isinstance(error, threading.BrokenBarrierError))
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(world_size)]
