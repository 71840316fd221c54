"""Interface of a device: the protocols `DeviceHandle`, `Stream`, `Event` and `TimeMark`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

Work = dist.Work
StartCollective = Callable[[bool], "Work | None"]


class Event(Protocol):
    """A point in a stream."""

    def synchronize(self) -> None:
        """The host waits for it."""
        ...

    def query(self) -> bool:
        """Whether the device has got there."""
        ...


class Stream(Protocol):
    """A queue of kernels and copies."""

    def wait_stream(self, other: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def record_event(self) -> Any: ...
    def synchronize(self) -> None: ...


class TimeMark(Protocol):
    """A point in time of the device's work."""

    def wall_ns(self) -> int:
        """When the host passed it, in nanoseconds since the epoch."""
        ...

    def ns_since(self, earlier: Any) -> int | None:
        """How long the device took from `earlier` to here; None if that is not known (yet)."""
        ...


class DeviceHandle(Protocol):
    """What impl may ask of a device; `reads` and `writes` name the tensors of an operation.

    A handle that executes eagerly may ignore `reads` and `writes`. They are there for handles that
    defer (to keep storages alive) and for handles that check the order of accesses.

    has_streams: whether what was put on the device may be still to come when the call returns.
    """

    type: str
    has_streams: bool

    def is_available(self) -> bool: ...
    def current_device(self) -> torch.device: ...
    def ranks_per_node(self) -> int: ...
    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in this kind of memory, and not on the host of a device."""
        ...

    # Streams

    def new_stream(self, priority: int = 0) -> Stream: ...
    def current_stream(self) -> Stream: ...
    def use_stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Inside, this thread puts its work on `stream`, and on the stream's device."""
        ...

    def record_event(self) -> Event:
        """A point in the current stream."""
        ...

    def new_future(self) -> torch.futures.Future[Any]:
        """One whose `wait` and callbacks are ordered after the stream that sets its result."""
        ...

    def mark(self) -> TimeMark:
        """Note this point in time."""
        ...

    # Work

    def enqueue(
        self,
        kernel: Callable[[], object],
        *,
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
    ) -> None:
        """Run `kernel` on the current stream, behind what is there."""
        ...

    def start_collective(
        self,
        start: StartCollective,
        *,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
    ) -> None:
        """Start a collective on the current stream. `start` receives `async_op`."""
        ...

    def flush(self) -> None:
        """Hand everything enqueued on the current stream to the device.

        Needed before foreign code (a communication hook, an optimizer) works with the results on
        the same stream.
        """
        ...

    # Memory

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        """Tell the allocator that `stream` uses `tensor`, which another stream allocated."""
        ...

    def alloc_storage(self, tensor: torch.Tensor, numel: int) -> None: ...
    def free_storage(self, tensor: torch.Tensor) -> None: ...
    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, or a copy of it in pinned memory of the host."""
        ...

    def pinned(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """(numel,): a pinned tensor of the host, for asynchronous copies; its memory is reused."""
        ...

    def copy_from_host(self, host: torch.Tensor, target: torch.Tensor) -> None:
        """Copy `host` to `target`; `host` may be overwritten as soon as this returns."""
        ...
