"""Ring buffer of messages in shared memory from one rank to another (one writer and one reader).

A message is a header (tag, bytes) and its payload; both occupy multiples of the header's size, so a
header never wraps. Messages may be larger than the ring: they pass through in pieces.
"""

from __future__ import annotations

import struct

from impl.schedules.arithmetic import round_up
from impl.transport.shm import words
from impl.transport.shm.layout import MappingLayout
from impl.transport.shm.mapping import Mapping

HEADER = struct.Struct("<qq")  # tag, bytes of payload
UNIT_NBYTES = HEADER.size
_MODULO = 0xFFFFFFFF


def padded(nbytes: int) -> int:
    """Bytes that a payload occupies in the ring."""
    return round_up(nbytes, UNIT_NBYTES)


class _End:
    """The state of either end: where the ring is, and the two counters (bytes, modulo 2^32)."""

    def __init__(
        self, mapping: Mapping, layout: MappingLayout, destination: int, source: int
    ) -> None:
        self._mapping = mapping
        self._u32 = mapping.u32
        self._capacity = layout.ring_nbytes
        self._start = layout.ring_offset(destination, source)
        tail = layout.ring_tail_offset(destination, source)
        head = layout.ring_head_offset(destination, source)
        self._tail_index, self._tail_address = tail // 4, mapping.address + tail
        self._head_index, self._head_address = head // 4, mapping.address + head
        self._position = 0  # own counter

    def _pieces(self, nbytes: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """(offset in the mapping, bytes) before and after the wrap, from its own counter on."""
        offset = self._position & (self._capacity - 1)
        first = min(nbytes, self._capacity - offset)
        return (self._start + offset, first), (self._start, nbytes - first)


class RingWriter(_End):
    """The source's end."""

    def room(self) -> int:
        """Bytes that can be put now; a multiple of UNIT_NBYTES."""
        head = self._u32[self._head_index]
        words.acquire(self._head_address)
        return self._capacity - ((self._position - head) & _MODULO)

    def put_header(self, tag: int, nbytes: int) -> None:
        """Needs room for UNIT_NBYTES. Visible to the reader after `publish`."""
        (offset, _), _ = self._pieces(UNIT_NBYTES)
        self._mapping.raw[offset : offset + UNIT_NBYTES] = HEADER.pack(tag, nbytes)
        self._advance(UNIT_NBYTES)

    def put(self, address: int, nbytes: int) -> None:
        """Needs room for `padded(nbytes)`."""
        (first, first_nbytes), (second, second_nbytes) = self._pieces(nbytes)
        words.memcpy(self._mapping.address + first, address, first_nbytes)
        if second_nbytes:
            words.memcpy(self._mapping.address + second, address + first_nbytes, second_nbytes)
        self._advance(padded(nbytes))

    def publish(self) -> None:
        # only this end adds to the word; at most the ring's size, which fits a signed int
        published = self._u32[self._tail_index]
        words.fetch_add(self._tail_address, (self._position - published) & 0x7FFFFFFF)

    def _advance(self, nbytes: int) -> None:
        self._position = (self._position + nbytes) & _MODULO


class RingReader(_End):
    """The destination's end."""

    def available(self) -> int:
        """Bytes that can be taken now; a multiple of UNIT_NBYTES."""
        tail = self._u32[self._tail_index]
        if tail != self._position:
            words.acquire(self._tail_address)
        return (tail - self._position) & _MODULO

    def take_header(self) -> tuple[int, int]:
        """(tag, bytes of payload)."""
        (offset, _), _ = self._pieces(UNIT_NBYTES)
        tag, nbytes = HEADER.unpack(self._mapping.raw[offset : offset + UNIT_NBYTES])
        self._advance(UNIT_NBYTES)
        return tag, nbytes

    def take(self, address: int, nbytes: int) -> None:
        """Copy out; the room is free for the writer after `release`."""
        (first, first_nbytes), (second, second_nbytes) = self._pieces(nbytes)
        words.memcpy(address, self._mapping.address + first, first_nbytes)
        if second_nbytes:
            words.memcpy(address + first_nbytes, self._mapping.address + second, second_nbytes)
        self._advance(padded(nbytes))

    def skip(self, nbytes: int) -> None:
        self._advance(padded(nbytes))

    def release(self) -> None:
        released = self._u32[self._head_index]
        words.fetch_add(self._head_address, (self._position - released) & 0x7FFFFFFF)

    def _advance(self, nbytes: int) -> None:
        self._position = (self._position + nbytes) & _MODULO
