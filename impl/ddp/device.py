"""What differs between devices, behind one small handle.

On a CPU there are no streams: work is done when the call returns, and every method here is trivial.
On an accelerator, work runs on streams in the order of submission, copies from the host are
asynchronous if the host memory is pinned, and time is measured by events on a stream.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor


class Mark(Protocol):
    """A point in time of the device's work."""

    def wall_ns(self) -> int:
        """When the host passed it, in nanoseconds since the epoch."""

    def ns_since(self, earlier: Any) -> int | None:
        """How long the device took from `earlier` to here; None if that is not known (yet)."""


class HostMark:
    """A point in time of work that is done when the call returns."""

    def __init__(self) -> None:
        self._wall_ns = time.time_ns()

    def wall_ns(self) -> int:
        return self._wall_ns

    def ns_since(self, earlier: HostMark) -> int | None:
        elapsed = self._wall_ns - earlier._wall_ns
        return elapsed if elapsed >= 0 else None


class StreamMark:
    """A point in a CUDA stream."""

    def __init__(self, device: torch.device) -> None:
        self._wall_ns = time.time_ns()
        self._device = device
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record(torch.cuda.current_stream(device))

    def wall_ns(self) -> int:
        return self._wall_ns

    def ns_since(self, earlier: StreamMark) -> int | None:
        # Torch waits for the two events here as well; they belong to the previous iteration. They
        # may be on two streams, so the later one says nothing of the earlier one.
        earlier._event.synchronize()
        self._event.synchronize()
        elapsed_ms = earlier._event.elapsed_time(self._event)
        return int(elapsed_ms * 1e6) if elapsed_ms >= 0 else None


class DeviceHandle:
    """The host: no streams, nothing to wait for."""

    has_streams = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> Mark:
        """Note this point in time."""
        return HostMark()

    def copy_from_host(self, host: Tensor, target: Tensor) -> None:
        """Copy `host` to `target`; `host` may be overwritten as soon as this returns."""
        target.copy_(host)

    def new_stream(self) -> Any:
        """A stream for work that may run beside the current one; None where there is none."""
        return None

    def current_stream(self) -> Any:
        return None

    def use_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Submit work to `stream` inside the context."""
        return contextlib.nullcontext()

    def wait_for_stream(self, stream: Any) -> None:
        """What is submitted from now on waits for what `stream` was given so far."""

    def record_event(self) -> Any:
        """A point in the current stream that others can wait for."""
        return None

    def wait_for_event(self, event: Any) -> None:
        """What is submitted from now on waits for `event`."""

    def new_future(self) -> torch.futures.Future[Any]:
        """Whoever waits for it comes after the stream that was current when it was resolved."""
        return torch.futures.Future()


class StreamDeviceHandle(DeviceHandle):
    """An accelerator with streams."""

    has_streams = True

    def mark(self) -> Mark:
        return StreamMark(self.device) if self.device.type == "cuda" else HostMark()

    def copy_from_host(self, host: Tensor, target: Tensor) -> None:
        # The copy may run long after the host has gone on and cleared `host` for the next
        # iteration. So it reads a pinned copy, which the caching allocator keeps until it is done.
        pinned = self.pinned_like(host)
        pinned.copy_(host)
        target.copy_(pinned, non_blocking=True)

    def pinned_like(self, host: Tensor) -> Tensor:
        """Memory of the host for as many elements, from which copies need not be waited for."""
        return torch.empty_like(host, pin_memory=True)

    def new_stream(self) -> Any:
        return torch.Stream(self.device)

    def current_stream(self) -> Any:
        return torch.accelerator.current_stream(self.device)

    def use_stream(self, stream: Any) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = stream
        return context

    def wait_for_stream(self, stream: Any) -> None:
        self.current_stream().wait_stream(stream)

    def record_event(self) -> Any:
        event = torch.Event(self.device)
        event.record(self.current_stream())
        return event

    def wait_for_event(self, event: Any) -> None:
        event.wait(self.current_stream())

    def new_future(self) -> torch.futures.Future[Any]:
        return torch.futures.Future(devices=[self.device])


_substitute: DeviceHandle | None = None


def handle_for(device: torch.device) -> DeviceHandle:
    """The handle for `device`."""
    if _substitute is not None:
        return _substitute
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and device.type == accelerator.type:
        return StreamDeviceHandle(device)
    return DeviceHandle(device)


@contextlib.contextmanager
def substituted_handle(handle: DeviceHandle) -> Iterator[None]:
    """Inside, every device's handle is `handle`: for checking the order of accesses."""
    global _substitute
    before, _substitute = _substitute, handle
    try:
        yield
    finally:
        _substitute = before
