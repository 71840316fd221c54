"""Simulated storages: `Memory` (bytes, access history), tensors' `Elements`, lookup by tensor.

A `Memory` is one life of a torch storage, from its allocation to its end: the storage is dropped,
or it is resized to nothing. Kernels that are still to be executed refer to it by `Elements`, so it
keeps its bytes for them, as memory of a device does.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from impl.testing.device.order import History

DEVICE, PINNED, PAGEABLE = "device", "pinned", "pageable"

_UNWRITTEN = 0xFF  # NaN in every floating type


class Memory:
    """Some bytes. kind: DEVICE, PINNED or PAGEABLE."""

    def __init__(self, kind: str, address: int, nbytes: int, home: Any) -> None:
        """home: the stream that it was allocated on, for memory of the device."""
        self.kind = kind
        self.nbytes = nbytes
        self.home = home
        self.also_used_by: list[Any] = []  # streams that the allocator was told of
        self.history = History()
        self.pending: list[Any] = []  # kernels that use it and may not be executed yet
        # No tensor that owns the bytes: the storage's end must not wait for the simulation.
        octets = (ctypes.c_char * nbytes).from_address(address)
        self.octets = torch.frombuffer(octets, dtype=torch.uint8)

    @property
    def is_on_device(self) -> bool:
        return self.kind == DEVICE

    def spoil(self) -> None:
        """Nothing has been written yet."""
        self.octets.fill_(_UNWRITTEN)

    def detach(self) -> None:
        """The storage ends; what kernels still need is kept for them."""
        if any(not kernel.is_done for kernel in self.pending):
            self.octets = self.octets.clone()


@dataclass(frozen=True, slots=True)
class Elements:
    """A tensor's elements in a memory."""

    memory: Memory
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_conj: bool
    is_neg: bool

    @staticmethod
    def of(tensor: Tensor, memory: Memory) -> Elements:
        return Elements(
            memory,
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def tensor(self) -> Tensor:
        """A tensor that has the elements now."""
        itemsize = self.dtype.itemsize
        whole = self.memory.octets[: self.memory.nbytes // itemsize * itemsize].view(self.dtype)
        view = whole.as_strided(self.shape, self.stride, self.offset)
        if self.is_conj:
            view = view.conj()
        return torch._neg_view(view) if self.is_neg else view

    def span(self) -> tuple[int, int]:
        """The bytes [start, stop) between its first and its last element."""
        itemsize = self.dtype.itemsize
        if 0 in self.shape:
            return self.offset * itemsize, self.offset * itemsize
        extent = 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
        return self.offset * itemsize, (self.offset + extent) * itemsize


class Memories:
    """Every memory that is in use, by the storage that it belongs to."""

    def __init__(
        self,
        on_end: Callable[[Memory], None],
        unseen: Callable[[], AbstractContextManager[None]],
        lock: AbstractContextManager[Any],
    ) -> None:
        """
        Args:
            on_end: called when a storage is dropped, while its bytes can still be read.
            unseen: around operations of the simulation's own.
            lock: of the thread that executes kernels; may be taken again by its holder.
        """
        self._lock = lock
        self._unseen = unseen
        # None while it has no bytes; its home. Addresses come again, so each entry also says whose:
        # torch keeps one Python object for a storage for as long as the storage lives.
        self._by_storage: dict[int, tuple[weakref.ref[Any], Memory | None, Any]] = {}
        self._on_end = on_end

    def find(self, tensor: Tensor) -> Memory | None:
        """The memory of a dense tensor; None if it is not known, or there are no bytes."""
        return self._by_storage[self._key(tensor)][1] if self.is_known(tensor) else None

    def is_known(self, tensor: Tensor) -> bool:
        """Whether the tensor's storage has had a memory, even if it has no bytes at present."""
        entry = self._by_storage.get(self._key(tensor))
        return entry is not None and entry[0]() is tensor.untyped_storage()

    def home_of(self, tensor: Tensor) -> Any:
        """The stream that a tensor's memory is, or was last, allocated on; None for the host's."""
        return self._by_storage[self._key(tensor)][2] if self.is_known(tensor) else None

    def add(self, tensor: Tensor, kind: str, home: Any, *, spoilt: bool = False) -> Memory | None:
        """A new memory for a tensor's storage; None if that has no bytes.

        spoilt: nothing has been written to it yet.
        """
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if not self.is_known(tensor):
            self._end(key, None)
            weakref.finalize(storage, self._end, key, id(storage)).atexit = False
        memory = None
        if nbytes:
            with self._unseen():
                memory = Memory(kind, storage.data_ptr(), nbytes, home)
                if spoilt:
                    memory.spoil()
        self._by_storage[key] = (weakref.ref(storage), memory, home)
        return memory

    def end(self, tensor: Tensor) -> None:
        """A storage is about to be resized to nothing; another memory may follow in it."""
        key = self._key(tensor)
        reference, home = weakref.ref(tensor.untyped_storage()), self.home_of(tensor)
        self._end(key, None)
        self._by_storage[key] = (reference, None, home)

    def _key(self, tensor: Tensor) -> int:
        key: int = tensor.untyped_storage()._cdata
        return key

    def _end(self, key: int, owner: int | None) -> None:
        with self._lock:  # no thread may be executing a kernel that uses the bytes
            entry = self._by_storage.get(key)
            if entry is None:
                return
            living = entry[0]()
            if owner is not None and living is not None and id(living) != owner:
                return  # of another storage, which has the address now
            del self._by_storage[key]
            if entry[1] is not None:
                self._on_end(entry[1])
                with self._unseen():
                    entry[1].detach()
