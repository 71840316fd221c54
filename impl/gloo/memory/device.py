"""What does staging ask of a device with streams? One small handle for each device.

Everything in this package that is stream-ordered goes through a `DeviceHandle`, so the ordering
rules can be read in one place (`cuda_staging.py`) and checked on a device that does not exist
(`impl.testing.device`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

_HIGH_PRIORITY = -1  # the copies are short, and other ranks wait for them


class Event(Protocol):
    """A point in a stream."""

    def synchronize(self) -> None:
        """The host waits for it."""


class Stream(Protocol):
    """A queue of kernels and copies."""

    def wait_event(self, event: Any) -> None: ...
    def record_event(self) -> Any: ...


class DeviceHandle(Protocol):
    """One device.

    down: the stream of copies to the host. up: the stream of copies to the device. All operations
    of the process share them: copies in one direction share one engine anyway.
    """

    @property
    def down(self) -> Stream: ...
    @property
    def up(self) -> Stream: ...

    def current_stream(self) -> Stream: ...
    def use_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Inside, this thread puts its work on `stream`, and on the stream's device."""

    def pinned(self, numel: int, dtype: torch.dtype) -> Tensor:
        """(numel,): host memory that copies need not wait for. Kept and given out again."""

    def record_stream(self, tensor: Tensor, stream: Any) -> None:
        """Tell the allocator that `stream` uses a tensor of another stream."""

    def new_future(self) -> torch.futures.Future[Any]:
        """One whose `wait` and callbacks are ordered after the stream that sets its result."""


class CudaHandle:
    """A CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.down: Any = torch.cuda.Stream(device, priority=_HIGH_PRIORITY)
        self.up: Any = torch.cuda.Stream(device, priority=_HIGH_PRIORITY)

    def current_stream(self) -> Any:
        return torch.cuda.current_stream(self._device)

    def use_stream(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def pinned(self, numel: int, dtype: torch.dtype) -> Tensor:
        # From torch's caching host allocator: no system call once the sizes repeat, and a block is
        # given out again only after the copies that use it, which the allocator notes itself.
        return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=True)

    def record_stream(self, tensor: Tensor, stream: Any) -> None:
        if tensor.is_sparse:
            tensor._indices().record_stream(stream)
            tensor._values().record_stream(stream)
        else:
            tensor.record_stream(stream)

    def new_future(self) -> torch.futures.Future[Any]:
        return torch.futures.Future(devices=[self._device])


_substitute: DeviceHandle | None = None


@functools.cache
def _cuda_handle(index: int) -> CudaHandle:
    return CudaHandle(torch.device("cuda", index))


def handle_for(tensor: Tensor) -> DeviceHandle | None:
    """The handle of the device that a tensor is on; None for the host, which needs no staging."""
    if _substitute is not None:
        return _substitute
    return _cuda_handle(tensor.device.index) if tensor.is_cuda else None


@contextlib.contextmanager
def substituted_handle(handle: DeviceHandle) -> Iterator[None]:
    """Inside, every tensor is staged through `handle`: for checking the order of accesses."""
    global _substitute
    before, _substitute = _substitute, handle
    try:
        yield
    finally:
        _substitute = before
