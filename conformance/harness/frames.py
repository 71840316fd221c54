"""Framing of messages between parent and rank (mark, length, bytes), non-blocking for the parent.

The parent must not wait for a rank: one that is stopped in the middle of an answer, or that does
not read, would stop the run with it. So the parent's end reads and writes what goes at the moment.
The rank's own code can write to its descriptors; what does not begin with the mark is no message.
"""

from __future__ import annotations

import os
import selectors
import struct
from collections import deque
from collections.abc import Collection, Iterator
from multiprocessing.connection import Connection
from typing import Any

_MARK = b"c10d"
_HEADER = struct.Struct("!4sQ")
_MOST_BYTES = 1 << 32
_PIECE_BYTES = 1 << 20


class BrokenFrame(Exception):
    """What came is no message."""


def frame(data: bytes) -> bytes:
    """The message as it is written."""
    return _HEADER.pack(_MARK, len(data)) + data


class ParentEnd:
    """The parent's end: nothing that is done with it waits for the rank."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        os.set_blocking(connection.fileno(), False)
        self._to_write: deque[memoryview] = deque()
        self._read = bytearray()

    def fileno(self) -> int:
        return self._connection.fileno()

    @property
    def has_more_to_write(self) -> bool:
        return bool(self._to_write)

    def send(self, data: bytes) -> None:
        """Write what fits now; `write` continues. Raises OSError if the rank has closed its end."""
        self._to_write.append(memoryview(frame(data)))
        self.write()

    def write(self) -> None:
        """Continue to write. Raises OSError if the rank has closed its end."""
        while self._to_write:
            try:
                written = os.write(self.fileno(), self._to_write[0][:_PIECE_BYTES])
            except BlockingIOError:
                return
            self._to_write[0] = self._to_write[0][written:]
            if not self._to_write[0]:
                self._to_write.popleft()

    def receive(self) -> bytes | None:
        """The next message, or None while it is not all there.

        Raises EOFError if there will be none, BrokenFrame if what came is none.
        """
        while (message := self._whole()) is None:
            try:
                piece = os.read(self.fileno(), _PIECE_BYTES)
            except BlockingIOError:
                return None
            if not piece:
                raise EOFError
            self._read += piece
        return message

    def _whole(self) -> bytes | None:
        """The first message of what was read, if it is whole."""
        begin = bytes(self._read[: len(_MARK)])
        if begin != _MARK[: len(begin)]:
            raise BrokenFrame(f"{begin!r}")
        if len(self._read) < _HEADER.size:
            return None
        _, length = _HEADER.unpack_from(self._read)
        if length > _MOST_BYTES:
            raise BrokenFrame(f"{length} bytes are announced; {_MOST_BYTES} is the most")
        end = _HEADER.size + length
        if len(self._read) < end:
            return None
        message = bytes(memoryview(self._read)[_HEADER.size : end])
        del self._read[:end]
        return message

    def close(self) -> None:
        self._connection.close()


class RankEnd:
    """The rank's end: it waits until a message is there, or is written."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send(self, data: bytes) -> None:
        """Raises OSError if the parent is gone."""
        left = memoryview(frame(data))
        while left:
            left = left[os.write(self._connection.fileno(), left[:_PIECE_BYTES]) :]

    def receive(self) -> bytes:
        """Raises EOFError if the parent is gone."""
        _, length = _HEADER.unpack(b"".join(self._pieces(_HEADER.size)))
        return b"".join(self._pieces(length))

    def _pieces(self, length: int) -> Iterator[bytes]:
        while length:
            piece = os.read(self._connection.fileno(), min(length, _PIECE_BYTES))
            if not piece:
                raise EOFError
            length -= len(piece)
            yield piece


def wait_for(
    readable: Collection[Any], writable: Collection[Any], timeout_s: float | None
) -> list[Any]:
    """Those of which one can be read or written now, or as soon as there is one."""
    with selectors.PollSelector() as selector:
        for thing in {*readable, *writable}:
            events = selectors.EVENT_READ if thing in readable else 0
            events |= selectors.EVENT_WRITE if thing in writable else 0
            selector.register(thing, events)
        return [key.fileobj for key, _ in selector.select(timeout_s)]
