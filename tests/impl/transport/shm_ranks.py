"""Shared-memory communicators whose ranks are threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

from impl.transport.base import CallInfo, Deadline
from impl.transport.shm import ShmCommunicator, meet
from impl.transport.shm.layout import Layout
from impl.transport.shm.mapping import Mapping, SharedFile

_T = TypeVar("_T")

SMALL_SEGMENT_NBYTES = 4096  # so that few elements already need several rounds
_JOIN_S = 60.0


class Sum:
    """Addition, as a transport sees it."""

    name = "sum"

    def __call__(self, accumulator: Tensor, incoming: Tensor) -> None:
        accumulator.add_(incoming)

    def fold(self, out: Tensor, parts: Sequence[Tensor]) -> None:
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        out.copy_(total)


SUM = Sum()


def call(operation: str = "all_reduce", signature: str = "", shown: str = "") -> CallInfo:
    return CallInfo(operation, 3, signature, shown)


def soon(timeout_s: float = 30.0) -> Deadline:
    return Deadline.after(timeout_s)


def new_mapping(world_size: int) -> tuple[Mapping, Layout]:
    """Memory for a group, seen by one mapping."""
    layout = Layout.plan(world_size, SMALL_SEGMENT_NBYTES)
    file = SharedFile(layout.total_nbytes)
    try:
        return Mapping(file.offer, layout.total_nbytes), layout
    finally:
        file.close()


def on_ranks(world_size: int, rank_function: Callable[[ShmCommunicator], _T]) -> list[_T]:
    """Call `rank_function(communicator)` on one thread a rank; the results by rank."""
    store = dist.HashStore()
    results: dict[int, _T] = {}
    failures: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        try:
            meeting = meet(
                store,
                rank,
                world_size,
                group="g",
                segment_nbytes=SMALL_SEGMENT_NBYTES,
                until=soon(),
            )
            assert meeting.mapping is not None
            communicator = ShmCommunicator(
                meeting.mapping,
                range(world_size),
                rank,
                group="g",
                segment_nbytes=SMALL_SEGMENT_NBYTES,
            )
            try:
                results[rank] = rank_function(communicator)
            finally:
                communicator.close()
        except BaseException as error:
            failures[rank] = error

    threads = [threading.Thread(target=run, args=(r,), daemon=True) for r in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_JOIN_S)
    for rank in sorted(failures):
        raise failures[rank]
    running = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    assert not running, f"ranks {running} did not end"
    return [results[rank] for rank in range(world_size)]
