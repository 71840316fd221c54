"""`DeviceHandle` of CUDA and other accelerators (`torch.<type>`): streams, events, pinned memory.

`AcceleratorHandle` hands out torch's streams and events. A kernel that is put on a stream is
asynchronous anyway, so `enqueue` simply calls the function, and a collective runs on the current
stream. `QueueHandle` is for devices without streams.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch

from impl.device.handle import Event, StartCollective, Stream, TimeMark
from impl.device.host import HostHandle, HostMark
from impl.device.storage import check_freed, check_sole_occupant, resize_storage, storage_numel


class StreamMark:
    """A point in the stream of a device whose events measure time."""

    def __init__(self, event: Any, stream: Stream) -> None:
        self._wall_ns = time.time_ns()
        self._event = event
        self._event.record(stream)

    def wall_ns(self) -> int:
        return self._wall_ns

    def ns_since(self, earlier: StreamMark) -> int | None:
        # Torch waits for the two events here as well; they belong to the previous iteration. They
        # may be on two streams, so the later one says nothing of the earlier one.
        earlier._event.synchronize()
        self._event.synchronize()
        elapsed_ms = earlier._event.elapsed_time(self._event)
        return int(elapsed_ms * 1e6) if elapsed_ms >= 0 else None


class _OfModule:
    """What the module of a device type knows.

    device: without an index, the handle is for whichever device is current.
    """

    def __init__(self, device: torch.device) -> None:
        self.type = device.type
        has_index = device != torch.device(device.type)
        self._where: tuple[torch.device, ...] = (device,) if has_index else ()
        self._module: Any = getattr(torch, device.type, None)
        if self._module is None:
            raise AttributeError(
                f"Device '{device}' does not have a corresponding backend registered as "
                f"'torch.{device.type}'."
            )

    def is_available(self) -> bool:
        return bool(self._module.is_available())

    def current_device(self) -> torch.device:
        current = self._module.current_device()
        return (
            torch.device(self.type, current) if isinstance(current, int) else torch.device(current)
        )

    def ranks_per_node(self) -> int:
        return int(self._module.device_count())

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self.type

    @cached_property
    def _can_pin(self) -> bool:
        try:
            return torch.empty(1, device="cpu", pin_memory=True).is_pinned()
        except RuntimeError:  # not for this accelerator
            return False

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory() if self._can_pin else tensor

    def pinned(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        # From torch's caching host allocator: no system call once the sizes repeat, and a block is
        # given out again only after the copies that use it, which the allocator notes itself.
        return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=self._can_pin)


class AcceleratorHandle(_OfModule):
    """A device with streams, reached as `torch.<type>`."""

    has_streams = True

    def new_stream(self, priority: int = 0) -> Stream:
        stream: Stream = self._module.Stream(*self._where, priority=priority)
        return stream

    def current_stream(self) -> Stream:
        stream: Stream = self._module.current_stream(*self._where)
        return stream

    def use_stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        context: contextlib.AbstractContextManager[Any] = self._module.stream(stream)
        return context

    def record_event(self) -> Event:
        event: Event = self.current_stream().record_event()
        return event

    def new_future(self) -> torch.futures.Future[Any]:
        return torch.futures.Future(devices=list(self._where or (self.current_device(),)))

    def mark(self) -> TimeMark:
        kind: Any = getattr(self._module, "Event", None)
        if not hasattr(kind, "elapsed_time"):
            return HostMark()
        return StreamMark(kind(enable_timing=True), self.current_stream())

    def enqueue(
        self,
        kernel: Callable[[], object],
        *,
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
    ) -> None:
        kernel()

    def start_collective(
        self,
        start: StartCollective,
        *,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
    ) -> None:
        start(False)

    def flush(self) -> None:
        return None

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        if not self.holds(tensor):
            return
        if tensor.is_sparse:
            tensor._indices().record_stream(stream)
            tensor._values().record_stream(stream)
        else:
            tensor.record_stream(stream)

    def alloc_storage(self, tensor: torch.Tensor, numel: int) -> None:
        if storage_numel(tensor) != numel:
            check_freed(tensor)
            resize_storage(tensor, numel)

    def free_storage(self, tensor: torch.Tensor) -> None:
        if tensor.untyped_storage().size() != 0:
            check_sole_occupant(tensor)
            resize_storage(tensor, 0)

    def copy_from_host(self, host: torch.Tensor, target: torch.Tensor) -> None:
        # The copy may run long after the host has gone on and cleared `host`. So it reads a pinned
        # copy, which the caching allocator keeps until it is done.
        pinned = self.pinned(host.numel(), host.dtype).view(host.shape)
        pinned.copy_(host)
        target.copy_(pinned, non_blocking=True)


class QueueHandle(_OfModule, HostHandle):
    """A device without streams of one's own, reached as `torch.<type>`.

    Its kernels run one after the other, and the backend that carries out a collective orders it
    with them. So it is treated as the host is: see [Note: Streams on the host].
    """

    def __init__(self, device: torch.device) -> None:
        _OfModule.__init__(self, device)
        HostHandle.__init__(self)
