"""Inputs that peers read where they lie: announced by their owners, mapped by the others.

[Note: reading where it lies] With the announcement of a large collective, a rank tells the offset
of its input in its arena, or 0 if it does not lie there, and then puts nothing into its slot. After
the first round every rank knows the same about all of them, and reads each input where it is. Its
owner is done when the others have read, which one more round at the end tells.

The first time that a rank has such an input in a group, it tells so (`_IS_NEW`) and goes through
its slot once more: the others map its arena, and tell each other whether they could. If one of them
could not, all go on as before, for good. That takes two rounds, so that what lies in the slots is
not overwritten: they use halves alternately.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor

from impl.transport.base import CallInfo, Deadline
from impl.transport.shm import arena as arenas
from impl.transport.shm.mapping import SharingRefused, open_offered
from impl.transport.shm.membership import Membership
from impl.transport.shm.rounds import Rounds

logger = logging.getLogger(__name__)

# Smaller inputs go through the slots: the round at the end would cost more than the copy.
REGISTERED_FROM_NBYTES = 256 << 10

_IS_NEW = 1  # an offset that no tensor has
_MAPPED, _NOT_MAPPED = 1, 2
_VIEWS_MAX = 512


class PeerMemory:
    """A peer's arena, mapped for reading."""

    def __init__(self, offer: str, nbytes: int) -> None:
        """Raises SharingRefused."""
        fd = open_offered(offer, nbytes, os.O_RDONLY)
        try:
            self._mmap = mmap.mmap(fd, nbytes, prot=mmap.PROT_READ)
        except OSError as error:
            raise SharingRefused(f"cannot map {offer}: {error.strerror}") from error
        finally:
            os.close(fd)
        self._bytes = np.frombuffer(self._mmap, dtype=np.uint8)
        self.address: int = self._bytes.ctypes.data

    @staticmethod
    def of(offer: str, nbytes: int) -> PeerMemory:
        """One for all groups."""
        memory = _mapped.get(offer)
        if memory is None:
            memory = _mapped[offer] = PeerMemory(offer, nbytes)
        return memory


_mapped: weakref.WeakValueDictionary[str, PeerMemory] = weakref.WeakValueDictionary()


class Registered:
    """What one rank of a group knows about the registered memory of all ranks."""

    def __init__(self, membership: Membership, rounds: Rounds) -> None:
        self._membership = membership
        self._rounds = rounds
        self._position = membership.position
        self._arena: arenas.Arena | None = None  # this rank's, once the group has used it
        # by position: the address of its arena in this process; 0 if some rank could not map it
        self._addresses: dict[int, int] = {}
        self._memories: list[PeerMemory] = []
        self._views: dict[tuple[int, torch.dtype, int], Tensor] = {}

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """(numel,), uninitialised and registered; None if there can be none."""
        arena = self._arena or arenas.get()
        if arena is None or numel == 0:
            return None
        self._arena = arena
        return arenas.new_tensor(arena, numel, dtype)

    def close(self) -> None:
        self._arena = None
        self._memories.clear()
        self._views.clear()

    def announce(self, input: Tensor | None) -> bool:
        """After the call itself: announce where the input lies, if it is to be read there.

        input: None if it may not be. Returns whether the others will read it there; otherwise it
        has to go into the slot.
        """
        offset = 0 if input is None else self._offset_of(input)
        if offset and self._position not in self._addresses:
            offset = _IS_NEW
        self._rounds.announce_input(offset)
        return offset > _IS_NEW

    def _offset_of(self, tensor: Tensor) -> int:
        arena = self._arena or arenas.current()
        if arena is None or tensor.nbytes < REGISTERED_FROM_NBYTES or self._membership.size == 1:
            return 0
        offset = arena.offset_of(tensor.data_ptr(), tensor.nbytes)
        if offset and self._position not in self._addresses:
            self._arena = arena
            self._membership.offer_arena(arena.offer, arena.nbytes)
        return offset if self._addresses.get(self._position, 1) else 0

    def inputs(self, call: CallInfo, until: Deadline) -> dict[int, int]:
        """After the first round: the addresses of all inputs that are read where they lie.

        By position. Every rank gets the same positions, its own perhaps among them.
        """
        offsets = self._rounds.announced_inputs()
        if not any(offsets):
            return {}
        for position, offset in enumerate(offsets):
            if offset == _IS_NEW:
                self._map(position, call, until)
        return {
            position: self._addresses[position] + offset
            for position, offset in enumerate(offsets)
            if offset > _IS_NEW
        }

    def _map(self, position: int, call: CallInfo, until: Deadline) -> None:
        """Map a rank's arena, on all ranks or on none."""
        rounds, address = self._rounds, 0
        if position == self._position:
            assert self._arena is not None
            address = self._arena.address
        else:
            try:
                memory = PeerMemory.of(*self._membership.arena_of(position))
                self._memories.append(memory)
                address = memory.address
            except SharingRefused as refused:
                logger.warning("Memory of rank %d is not read: %s", position, refused)
        rounds.announce_verdict(_MAPPED if address else _NOT_MAPPED)
        rounds.meet(call, until)
        verdicts = rounds.announced_verdicts()
        rounds.meet(call, until)
        self._addresses[position] = 0 if _NOT_MAPPED in verdicts else address

    def view(self, address: int, dtype: torch.dtype, numel: int) -> Tensor:
        """(numel,): what lies at one of these addresses. Not to be written to."""
        key = (address, dtype, numel)
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= _VIEWS_MAX:
                self._views.clear()
            memory: Any = (ctypes.c_char * (numel * dtype.itemsize)).from_address(address)
            with torch.inference_mode(False):
                view = self._views[key] = torch.frombuffer(memory, dtype=dtype)
        return view
