"""Runs programs on transports over sockets, with ranks that are threads of one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch.distributed as dist

from impl.transport.base import CallInfo, Communicator, Deadline
from impl.transport.sockets.gloo_wire import connect_gloo
from impl.transport.sockets.tcp import connect_tcp
from tests.impl.threads import on_threads

PATIENCE_S = 60.0
MODES = pytest.mark.parametrize("mode", ["tcp", "gloo"])  # both ways of sockets


@dataclass(slots=True)
class Loopback:
    """Options that need no network."""

    interface: str | None = None
    hostname: str | None = "127.0.0.1"


CONNECT = {"tcp": connect_tcp, "gloo": connect_gloo}


def soon(timeout_s: float = PATIENCE_S) -> Deadline:
    return Deadline.after(timeout_s)


@dataclass(slots=True)
class Calls:
    """Numbers a rank's collectives, as a process group does."""

    sequence: int = 0
    made: list[CallInfo] = field(default_factory=list)

    def __call__(self, operation: str, signature: str = "", shown: str = "") -> CallInfo:
        call = CallInfo(operation, self.sequence, signature, shown)
        self.sequence += 1
        self.made.append(call)
        return call


SINGLE = CallInfo("message", -1, "", "")


def run_ranks(world_size: int, rank_function: Callable[[int], Any]) -> list[Any]:
    """`on_threads`, which leaves a rank the time to run out of patience."""
    return on_threads(world_size, rank_function, 2 * PATIENCE_S)


@contextlib.contextmanager
def connected(
    mode: str,
    store: dist.Store,
    rank: int,
    world_size: int,
    options: Loopback | None = None,
    timeout_s: float = PATIENCE_S,
) -> Iterator[Communicator]:
    connect = CONNECT[mode]
    communicator = connect(store, rank, world_size, "test", options or Loopback(), soon(timeout_s))
    try:
        yield communicator
    finally:
        communicator.close()


def run_group(
    mode: str,
    world_size: int,
    program: Callable[[Communicator, Calls], Any],
    options: Loopback | None = None,
) -> list[Any]:
    """Connect a group, run the program on every rank, and close it."""
    store = dist.HashStore()

    def rank_function(rank: int) -> Any:
        with connected(mode, store, rank, world_size, options) as communicator:
            return program(communicator, Calls())

    return run_ranks(world_size, rank_function)
