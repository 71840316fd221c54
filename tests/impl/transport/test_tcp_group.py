"""Groups of the authenticated mode, without sockets: how they end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import pytest
import torch

from impl import errors
from impl.transport.base import CallInfo
from impl.transport.messages.frames import Opcode, frame_header
from impl.transport.sockets.collectives import CollectiveBuilder
from impl.transport.sockets.group import what_is_missing
from impl.transport.sockets.loop import Timer, Timers
from impl.transport.sockets.tcp_group import TcpGroup


class StillLoop:
    """A loop in which no time passes."""

    def __init__(self) -> None:
        self.timers = Timers()
        self.before_lock: list[Callable[[], None]] = []  # what another thread does first, once

    @property
    def lock(self) -> contextlib.AbstractContextManager[None]:
        return self

    def __enter__(self) -> None:
        while self.before_lock:
            self.before_lock.pop()()

    def __exit__(self, *_: object) -> None:
        pass

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
    """A connection whose other end is gone, after it had sent something."""

    def __init__(self, sent: bytes = b"") -> None:
        self.sent = sent

    def recv_into(self, memory: memoryview) -> int:
        count = len(self.sent)
        memory[:count], self.sent = self.sent, b""
        return count

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


@pytest.mark.parametrize("numel", [4, 100_000])  # eager, and announced first
def test_a_rank_that_leaves_while_a_call_begins_is_missed(numel: int) -> None:
    """A rank that has begun as many calls as this one may leave, but not be waited for."""
    loop = StillLoop()
    group = TcpGroup(0, 2, "dp", 1, loop)
    link = group.hubs[0].attach(1, EndedStream(sent=frame_header(Opcode.FAREWELL, 0, 0)))

    def leave() -> None:
        link.on_readable()
        link.on_readable()

    loop.before_lock.append(leave)
    broadcast = CollectiveBuilder(0, 2, group.plans).broadcast(torch.ones(numel), 0)
    with pytest.raises(errors.PeerLost, match=r"lost rank 1 of 2 \(it has left the group\)"):
        next(group.steps(broadcast, CallInfo("broadcast", 0, "", "")))


def test_a_rank_of_which_something_is_missing_may_itself_wait() -> None:
    due = "rank 1 did not send or receive what was due"
    assert what_is_missing([1], 2) == due
    told = f"{due}; whether it stopped or itself waits for another rank is not known"
    assert what_is_missing([1], 3) == told
    assert what_is_missing([], 3) == "its own messages did not leave"
