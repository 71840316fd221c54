"""Record in shared memory of how the group has ended (see `transport.end_cause`).

The first rank that gives up writes the group's fate into shared memory, once, and wakes all ranks.
"""

from __future__ import annotations

import struct
import time

from impl.transport.end_cause import Fate
from impl.transport.shm import words
from impl.transport.shm.layout import MappingLayout
from impl.transport.shm.mapping import Mapping

_HEADER = struct.Struct("<H")  # bytes of what follows
_WRITING_S = 1.0  # the longest that a rank may take from its claim to the end of its text


class FateBoard:
    """The place in shared memory where the fate is written."""

    def __init__(self, mapping: Mapping, layout: MappingLayout) -> None:
        self._mapping = mapping
        self._claim_address = mapping.address + layout.fate_claim_offset
        self._ready_address = mapping.address + layout.fate_ready_offset
        self._ready_index = layout.fate_ready_offset // 4
        self._text_offset = layout.fate_text_offset
        self._text_nbytes = layout.fate_text_nbytes - _HEADER.size

    def is_decided(self) -> bool:
        return self._mapping.u32[self._ready_index] != 0

    def decide(self, fate: Fate) -> bool:
        """Write the fate, unless another rank was first. The caller wakes sleeping ranks.

        Afterwards the fate can be read, unless the rank that was first died while it wrote.
        """
        if words.fetch_add(self._claim_address, 1) != 0:
            stop_s = time.monotonic() + _WRITING_S
            while not self.is_decided() and time.monotonic() < stop_s:
                time.sleep(50e-6)
            return False
        text = fate.encode().encode()[: self._text_nbytes]
        record = _HEADER.pack(len(text)) + text
        self._mapping.raw[self._text_offset : self._text_offset + len(record)] = record
        words.fetch_add(self._ready_address, 1)
        return True

    def read(self) -> Fate | None:
        if not self.is_decided():
            return None
        words.acquire(self._ready_address)
        start = self._text_offset
        header = self._mapping.raw[start : start + _HEADER.size]
        (nbytes,) = _HEADER.unpack(header)
        body = self._mapping.raw[start + _HEADER.size : start + _HEADER.size + nbytes]
        return Fate.decode(-1, bytes(body).decode(errors="replace"))
