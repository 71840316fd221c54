"""Frame parser and send queue of a connection. No sockets: the same code runs in simulations.

[Note: who owns the memory]
A reader does not collect bytes and hand them over: it says where the next bytes should go. Small
things go to a staging buffer; the payload of a message goes straight to the tensor that wants it.
So one turn of reading is `n = socket.recv_into(reader.buffer())`, then `for event in
reader.received(n)`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from impl.transport.lent import MemoryGone, copy_of, is_there
from impl.transport.messages.frames import (
    PREAMBLE,
    PREAMBLE_NBYTES,
    FrameRules,
    Preamble,
    check_preamble,
)

STAGING_NBYTES = 64 << 10
DISCARD = memoryview(bytearray(64 << 10))  # where unwanted payloads go; never read
BUFFERS_PER_WRITE = 64  # well below IOV_MAX, 1024 on Linux


class Happened(Enum):
    FRAME = 1  # a frame without payload is complete
    PAYLOAD_BEGINS = 2  # a preamble is there; the reader needs `place` before it goes on
    PAYLOAD_ENDS = 3  # the whole payload lies where it was wanted


class FrameReader:
    """Turns a stream of bytes into events, in any portions."""

    __slots__ = (
        "_current",
        "_filled",
        "_missing",
        "_rules",
        "_staging",
        "_start",
        "_stop",
        "_target",
    )

    def __init__(self, rules: FrameRules) -> None:
        self._rules = rules
        self._staging = memoryview(bytearray(STAGING_NBYTES))
        self._start = 0  # of what is staged and not yet parsed
        self._stop = 0
        self._current: Preamble | None = None  # whose payload is under way
        self._missing = 0  # bytes of that payload
        self._target: memoryview | None = None  # where they go; None: nowhere
        self._filled = 0

    def buffer(self) -> memoryview:
        """Where the next bytes of the stream belong; never empty."""
        if self._current is not None and self._start == self._stop:
            if self._target is None or not is_there(self._target):
                return DISCARD[: self._missing]
            return self._target[self._filled :]
        if self._start:
            # What is left is the beginning of a preamble: short, and it needs room behind it.
            left = self._stop - self._start
            self._staging[:left] = bytes(self._staging[self._start : self._stop])
            self._start, self._stop = 0, left
        return self._staging[self._stop :]

    def place(self, target: memoryview | None) -> None:
        """Set the memory for the payload that has just begun, of its length; None drops it."""
        assert self._current is not None
        assert target is None or len(target) == self._current.length
        self._target = target

    def relocate(self, target: memoryview) -> bool:
        """Continue the payload under way in other memory, with what has arrived of it.

        False if that is lost, since its memory is gone.
        """
        kept = self._target is None or is_there(self._target)
        if self._target is not None and kept:
            target[: self._filled] = self._target[: self._filled]
        self.place(target)
        return kept

    def received(self, nbytes: int) -> Iterator[tuple[Happened, Preamble]]:
        """`nbytes` more have been written to `buffer()`; what has happened, in order.

        Exhaust the iterator before reading on. Raises `ProtocolError` at a malformed frame; the
        reader is useless from then on.
        """
        if self._current is not None and self._start == self._stop:
            self._filled += nbytes
            self._missing -= nbytes
            if self._missing:
                return
            yield Happened.PAYLOAD_ENDS, self._finish()
            return
        self._stop += nbytes
        while self._stop - self._start >= PREAMBLE_NBYTES:
            preamble = Preamble._make(PREAMBLE.unpack_from(self._staging, self._start))
            has_payload = check_preamble(preamble, self._rules)
            self._start += PREAMBLE_NBYTES
            if not has_payload:
                yield Happened.FRAME, preamble
                continue
            self._current, self._missing, self._filled = preamble, preamble.length, 0
            yield Happened.PAYLOAD_BEGINS, preamble
            self._take_staged()
            if self._missing:
                return
            yield Happened.PAYLOAD_ENDS, self._finish()

    def _take_staged(self) -> None:
        count = min(self._missing, self._stop - self._start)
        if self._target is not None and is_there(self._target):
            self._target[:count] = self._staging[self._start : self._start + count]
        self._start += count
        self._filled += count
        self._missing -= count

    def _finish(self) -> Preamble:
        preamble = self._current
        assert preamble is not None
        self._current = self._target = None
        return preamble

    @property
    def has_payload_under_way(self) -> bool:
        return self._current is not None


class Outgoing(Protocol):
    """Who wants to know what becomes of bytes in a queue."""

    def finish(self, error: Exception | None = None) -> None:
        """They have been written, or never will be."""


class SendQueue:
    """Frames on their way out, in order, and whose they are."""

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: deque[_Entry] = deque()

    def __bool__(self) -> bool:
        return bool(self._entries)

    def push(self, frame: bytes, survives: bool = False) -> None:
        """A whole frame, or the preamble of one whose payload follows by `push_payload`.

        Frames that survive are sent even after a `cut`.
        """
        self._entries.append(_Entry(memoryview(frame), starts_frame=True, survives=survives))

    def push_payload(self, data: memoryview, owner: Outgoing) -> None:
        self._entries.append(_Entry(data, starts_frame=False, owner=owner))

    def buffers(self) -> list[memoryview]:
        """The buffers to write next, in order; only some of them, if there are many.

        Raises MemoryGone if the memory of one of them is gone: what it belongs to cannot be sent.
        """
        entries = self._entries
        chosen = [entries[i].data for i in range(min(len(entries), BUFFERS_PER_WRITE))]
        for data in chosen:
            if not is_there(data):
                raise MemoryGone
        return chosen

    def sent(self, nbytes: int) -> None:
        """The first `nbytes` of what `buffers` returned have been written."""
        entries = self._entries
        while entries:
            entry = entries[0]
            size = len(entry.data)
            if nbytes < size:
                if nbytes:
                    entry.data = entry.data[nbytes:]
                    entry.starts_frame = False
                return
            nbytes -= size
            entries.popleft()
            if entry.owner is not None:
                entry.owner.finish()

    def detach(self, owner: Outgoing) -> None:
        """Copy what is still to be written for `owner`, so that its memory can be reused."""
        for entry in self._entries:
            if entry.owner is owner:
                entry.data, entry.owner = copy_of(entry.data), None

    def cut(self, error: Exception) -> None:
        """Drop the frames that have not begun; finish the one that has, from a copy.

        Afterwards other frames may follow, and the other end can make sense of them.
        """
        entries = list(self._entries)
        owners = [entry.owner for entry in entries if entry.owner is not None]
        self._entries.clear()
        has_begun = True  # the frame of the entry at hand; false from the first beginning on
        for entry in entries:
            has_begun = has_begun and not entry.starts_frame
            if has_begun or entry.survives:
                entry.data, entry.owner = copy_of(entry.data), None
                self._entries.append(entry)
        for owner in owners:
            owner.finish(error)

    def abandon(self, error: Exception) -> None:
        """There is no peer to write to any more."""
        owners = [entry.owner for entry in self._entries if entry.owner is not None]
        self._entries.clear()
        for owner in owners:
            owner.finish(error)


@dataclass(slots=True, eq=False)
class _Entry:
    data: memoryview
    starts_frame: bool  # nothing of its frame has been written
    owner: Outgoing | None = None
    survives: bool = False
