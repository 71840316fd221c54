"""Frames arrive whole and in order, the parent never blocks, and other bytes are rejected."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import pytest

from conformance.harness.frames import BrokenFrame, ParentEnd, RankEnd, frame, wait_for

LARGE = bytes(range(256)) * 20_000  # more than a socket takes at once


@pytest.fixture
def pipe() -> Iterator[tuple[ParentEnd, Connection]]:
    ours, theirs = Pipe()
    yield ParentEnd(ours), theirs
    ours.close()
    theirs.close()


@pytest.mark.parametrize("data", [b"", b"x", LARGE])
def test_messages_arrive_in_order(pipe: tuple[ParentEnd, Connection], data: bytes) -> None:
    parent, theirs = pipe
    rank = RankEnd(theirs)

    def send_back() -> None:
        for _ in range(2):
            rank.send(rank.receive())

    echo = threading.Thread(target=send_back)
    echo.start()
    parent.send(data)
    parent.send(data[::-1])
    got: list[bytes] = []
    while len(got) < 2:
        wait_for([parent], [parent] if parent.has_more_to_write else [], 5)
        parent.write()
        message = parent.receive()
        got += [] if message is None else [message]
    echo.join()
    assert got == [data, data[::-1]]


def test_the_parent_waits_neither_to_write_nor_to_read(pipe: tuple[ParentEnd, Connection]) -> None:
    parent, theirs = pipe
    parent.send(LARGE)
    assert parent.has_more_to_write
    assert parent.receive() is None
    os.write(theirs.fileno(), frame(b"whole")[:-1])
    assert parent.receive() is None
    os.write(theirs.fileno(), b"e")
    assert parent.receive() == b"whole"


@pytest.mark.parametrize("data", [b"hello", b"\0\1\0\0", b"c10dxxxxxxxx", b"c11"])
def test_what_is_no_frame_is_noticed_at_once(
    pipe: tuple[ParentEnd, Connection], data: bytes
) -> None:
    parent, theirs = pipe
    os.write(theirs.fileno(), data)
    with pytest.raises(BrokenFrame):
        parent.receive()


def test_the_end_is_noticed_on_both_sides(pipe: tuple[ParentEnd, Connection]) -> None:
    parent, theirs = pipe
    theirs.close()
    with pytest.raises(EOFError):
        parent.receive()
    with pytest.raises(OSError, match="Broken pipe"):
        parent.send(b"x")


def test_a_rank_notices_that_its_parent_is_gone(pipe: tuple[ParentEnd, Connection]) -> None:
    parent, theirs = pipe
    parent.close()
    with pytest.raises(EOFError):
        RankEnd(theirs).receive()
