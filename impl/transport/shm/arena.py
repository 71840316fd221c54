"""Tensor memory of this process that peers can map: one shared file, allocated from and reused.

[Note: registered memory] A tensor that lies in an arena is *registered*: the other ranks on this
host read it where it lies (`registered.py`), so nothing is copied into slots for them. Each process
has one arena, for all of its groups. Peers map it for reading only: whatever happens to a group,
only its owner ever writes to a tensor.

The file is anonymous and sparse (see `mapping.py`), as large as the limit: PYGLOO_REGISTERED_NBYTES
in the environment (0 turns registered memory off), else a quarter of the machine's memory. Pages
are claimed when they are first allocated, so a machine whose memory is full refuses, and the tensor
becomes an ordinary one; they are kept for the next tensor. When the last tensor is freed, all but
64 MiB go back to the system, and with the last group and the last tensor, the arena itself.

[Note: registered memory and fork] Shared memory is not copied on write. So a child of `os.fork`
gives its inherited tensors ordinary memory with a copy of what they held, and its parent waits for
that. The arena stays the parent's: what the child frees is not given back. Children started in
other ways inherit no tensors.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import threading
import weakref
from bisect import insort
from collections import deque
from typing import Any

import torch
from torch import Tensor

from impl.schedules.arithmetic import round_up
from impl.transport.shm.layout import PAGE_NBYTES
from impl.transport.shm.mapping import SharedFile, SharingRefused
from impl.transport.shm.words import memcpy

logger = logging.getLogger(__name__)

LIMIT_VARIABLE = "PYGLOO_REGISTERED_NBYTES"
_KEPT_NBYTES = 64 << 20  # of an arena without tensors

_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
_FALLOC_PUNCH_HOLE = 0x02 | 0x01  # which wants FALLOC_FL_KEEP_SIZE with it
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = _libc.mremap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.mremap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p),
)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)


def limit_nbytes() -> int:
    """How much registered memory this process may have; 0 for none.

    Raises ValueError if the variable holds something else than a number of bytes.
    """
    told = os.environ.get(LIMIT_VARIABLE, "")
    if told:
        if not (told.isascii() and told.isdigit()):
            raise ValueError(f"{LIMIT_VARIABLE} is {told!r}; it must be a number of bytes")
        return int(told)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4


class FreeRanges:
    """Which bytes of [start, stop) are free: first fit, neighbours are merged."""

    def __init__(self, start: int, stop: int) -> None:
        self._free = [(start, stop)]

    def take(self, nbytes: int) -> int | None:
        """Where `nbytes` bytes begin that were free; None if there are none in one piece."""
        for index, (start, stop) in enumerate(self._free):
            if stop - start >= nbytes:
                rest = [(start + nbytes, stop)] if stop - start > nbytes else []
                self._free[index : index + 1] = rest
                return start
        return None

    def give(self, start: int, nbytes: int) -> None:
        """Take back what was taken."""
        insort(self._free, (start, start + nbytes))
        merged = self._free[:1]
        for begin, end in self._free[1:]:
            if begin == merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
            else:
                merged.append((begin, end))
        self._free = merged


class Arena:
    """The shared file, mapped, and what of it is in use."""

    def __init__(self, nbytes: int) -> None:
        """Raises SharingRefused if there can be none."""
        self.nbytes = nbytes // PAGE_NBYTES * PAGE_NBYTES
        self._file = SharedFile(self.nbytes)
        try:
            self._mmap = mmap.mmap(self._file.fd, self.nbytes)
        except OSError as error:
            self._file.close()
            raise SharingRefused(f"mapping of {nbytes} bytes: {error.strerror}") from error
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._mmap))
        self.offer = self._file.offer
        self.live: dict[int, int] = {}  # offset: bytes
        self._free = FreeRanges(PAGE_NBYTES, self.nbytes)  # the first page holds the nonce
        self._claimed_stop = PAGE_NBYTES  # the file has pages up to here
        self._freed: deque[int] = deque()  # offsets; filled wherever a tensor happens to be freed
        self._lock = threading.Lock()
        self._is_ours = True  # and not that of a process which this one was forked from
        weakref.finalize(self, self._file.close).atexit = False

    def offset_of(self, address: int, nbytes: int) -> int:
        """Where these bytes lie in the file; 0 if they do not."""
        offset = address - self.address
        return offset if 0 < offset <= self.nbytes - nbytes else 0

    def allocate(self, nbytes: int) -> Any:
        """A buffer of so many bytes, at least one, that frees itself; None if there is no room."""
        if not self._is_ours:
            return None
        with self._lock:
            self._take_back()
            taken = round_up(nbytes, PAGE_NBYTES)
            offset = self._free.take(taken)
            if offset is None:
                return None
            if not self._claim(offset + taken):
                self._free.give(offset, taken)
                return None
            self.live[offset] = taken
        buffer: Any = (ctypes.c_char * nbytes).from_address(self.address + offset)
        # what is freed may be freed anywhere, in `allocate` too: without a lock
        weakref.finalize(buffer, _put_back, self, offset).atexit = False
        return buffer

    def _take_back(self) -> None:
        while self._freed:
            offset = self._freed.popleft()
            self._free.give(offset, self.live.pop(offset))
        if not self.live and self._claimed_stop > _KEPT_NBYTES:
            unused = self._claimed_stop - _KEPT_NBYTES
            _libc.fallocate(self._file.fd, _FALLOC_PUNCH_HOLE, _KEPT_NBYTES, unused)
            self._claimed_stop = _KEPT_NBYTES

    def _claim(self, stop: int) -> bool:
        """Give the file pages up to `stop`: later, a lack of them would end the process."""
        if stop > self._claimed_stop:
            try:
                os.posix_fallocate(self._file.fd, self._claimed_stop, stop - self._claimed_stop)
            except OSError as error:
                logger.warning("Ordinary memory instead of registered: %s", error.strerror)
                return False
            self._claimed_stop = stop
        return True

    def put_back(self, offset: int) -> None:
        if not self._is_ours:
            return
        self._freed.append(offset)
        if len(self._freed) == len(self.live) and self._lock.acquire(blocking=False):
            try:
                self._take_back()
            finally:
                self._lock.release()

    def leave_to_parent(self) -> None:
        """In a forked child: touch the file no more, and give the tensors memory of the child's."""
        self._is_ours = False
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        for offset, nbytes in self.live.items():
            place = self.address + offset
            copy = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, private, -1, 0)
            if copy == _MAP_FAILED:
                raise OSError(ctypes.get_errno(), "no memory for what was registered")
            memcpy(copy, place, nbytes)
            _libc.mremap(copy, nbytes, nbytes, _MREMAP_MAYMOVE | _MREMAP_FIXED, place)


def _put_back(arena: Arena, offset: int) -> None:
    arena.put_back(offset)


_current: weakref.ref[Arena] | None = None
_creating = threading.Lock()


def current() -> Arena | None:
    """This process's arena, if it has one. Groups and tensors keep it alive."""
    return None if _current is None else _current()


def get() -> Arena | None:
    """This process's arena, a new one if need be; None if there can be none."""
    global _current
    with _creating:
        arena = current()
        if arena is None and limit_nbytes() > PAGE_NBYTES:
            try:
                arena = Arena(limit_nbytes())
            except SharingRefused as refused:
                logger.warning("No registered memory: %s", refused)
                return None
            _current = weakref.ref(arena)
        return arena


def new_tensor(arena: Arena, numel: int, dtype: torch.dtype) -> Tensor | None:
    """(numel,), at least one element, uninitialised; None if the arena has no room for it."""
    buffer = arena.allocate(numel * dtype.itemsize)
    if buffer is None:
        return None
    with torch.inference_mode(False):  # the first call's mode must not stick to a long-lived tensor
        return torch.frombuffer(buffer, dtype=dtype)


# -- see [Note: registered memory and fork]

_copied: tuple[int, int] | None = None  # pipe: the child has copied


def _before_fork() -> None:
    global _copied
    arena = current()
    if arena is not None and arena.live:
        _copied = os.pipe()


def _in_child() -> None:
    global _current, _copied, _creating
    arena, _current, _creating = current(), None, threading.Lock()
    try:
        if arena is not None:
            arena.leave_to_parent()
    finally:
        if _copied is not None:
            os.write(_copied[1], b"x")
            for fd in _copied:
                os.close(fd)
            _copied = None


def _in_parent() -> None:
    global _copied
    if _copied is None:
        return
    (reading, writing), _copied = _copied, None
    os.close(writing)
    with contextlib.suppress(OSError):
        os.read(reading, 1)  # nothing, if the child ended
    os.close(reading)


os.register_at_fork(before=_before_fork, after_in_child=_in_child, after_in_parent=_in_parent)
