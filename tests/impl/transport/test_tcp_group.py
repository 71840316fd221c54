"""Very large groups of the authenticated mode, without sockets."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from impl.transport.sockets.group import what_is_missing
from impl.transport.sockets.loop import Timer, Timers
from impl.transport.sockets.tcp_group import TcpGroup


class StillLoop:
    """A loop in which no time passes."""

    lock = contextlib.nullcontext()

    def __init__(self) -> None:
        self.timers = Timers()

    def now(self) -> float:
        return 0.0

    def call_at(self, due_s: float, callback: Callable[[], None]) -> Timer:
        return self.timers.add(due_s, callback)

    def notify(self) -> None:
        pass

    def defer(self, callback: Callable[[], None]) -> None:
        callback()

    def run_deferred(self) -> None:
        pass


class EndedStream:
    """A connection whose other end is gone."""

    def recv_into(self, memory: memoryview) -> int:
        return 0

    def sendmsg(self, parts: Sequence[memoryview]) -> int:
        return sum(len(part) for part in parts)

    def want_write(self, wanted: bool) -> None:
        pass

    def close(self) -> None:
        pass


def test_any_number_of_peers_may_vanish_at_once() -> None:
    world_size = 2000
    group = TcpGroup(0, world_size, "dp", 1, StillLoop())
    links = [group.hubs[0].attach(peer, EndedStream()) for peer in range(1, world_size)]
    links[0].on_readable()
    assert group.fate is not None
    assert "lost rank 1 of 2000" in group.fate.text


def test_a_rank_of_which_something_is_missing_may_itself_wait() -> None:
    due = "rank 1 did not send or receive what was due"
    assert what_is_missing([1], 2) == due
    told = f"{due}; whether it stopped or itself waits for another rank is not known"
    assert what_is_missing([1], 3) == told
    assert what_is_missing([], 3) == "its own messages did not leave"
