"""Runs functions on shared-memory communicators, with ranks that are threads of this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from impl.transport.base import CallInfo, Deadline
from impl.transport.shm import ShmCommunicator, meet
from impl.transport.shm.layout import MappingLayout
from impl.transport.shm.mapping import Mapping, SharedFile
from tests.impl.threads import on_threads

_T = TypeVar("_T")

SMALL_SEGMENT_NBYTES = 4096  # so that few elements already need several rounds


def call(operation: str = "all_reduce", signature: str = "", shown: str = "") -> CallInfo:
    return CallInfo(operation, 3, signature, shown)


def soon(timeout_s: float = 30.0) -> Deadline:
    return Deadline.after(timeout_s)


def new_mapping(
    world_size: int, segment_nbytes: int = SMALL_SEGMENT_NBYTES
) -> tuple[Mapping, MappingLayout]:
    """Memory for a group, seen by one mapping."""
    layout = MappingLayout.plan(world_size, segment_nbytes)
    file = SharedFile(layout.total_nbytes)
    try:
        return Mapping(file.offer, layout.total_nbytes), layout
    finally:
        file.close()


def on_ranks(
    world_size: int,
    rank_function: Callable[[ShmCommunicator], _T],
    segment_nbytes: int = SMALL_SEGMENT_NBYTES,
) -> list[_T]:
    """Call `rank_function(communicator)` on one thread a rank; the results by rank."""
    store = dist.HashStore()

    def run(rank: int) -> _T:
        meeting = meet(
            store, rank, world_size, group="g", segment_nbytes=segment_nbytes, until=soon()
        )
        assert meeting.mapping is not None
        communicator = ShmCommunicator(
            meeting.mapping,
            range(world_size),
            rank,
            group="g",
            segment_nbytes=segment_nbytes,
        )
        try:
            return rank_function(communicator)
        finally:
            communicator.close()

    return on_threads(world_size, run)
