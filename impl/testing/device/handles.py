"""The simulated device as `impl.fsdp` and `impl.ddp` see theirs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from impl.ddp.device import HostMark, Mark, StreamDeviceHandle
from impl.testing.device.future import SimulatedFuture
from impl.testing.device.simulated import SimulatedDevice, SimulatedEvent, SimulatedStream


class FsdpHandle:
    """As `impl.fsdp.device.DeviceHandle`: kernels go to the current stream as they come."""

    type = "cpu"

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device

    def is_available(self) -> bool:
        return True

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def ranks_per_node(self) -> int:
        return 2

    def holds(self, tensor: Tensor) -> bool:
        return self._device.is_on_device(tensor)

    def new_stream(self, priority: int = 0) -> SimulatedStream:
        return self._device.new_stream()

    def current_stream(self) -> SimulatedStream:
        return self._device.current_stream()

    def use_stream(self, stream: Any) -> AbstractContextManager[None]:
        return self._device.use_stream(stream)

    def record_event(self) -> SimulatedEvent:
        return self._device.current_stream().record_event()

    def enqueue(
        self,
        kernel: Callable[[], object],
        *,
        reads: Sequence[Tensor] = (),
        writes: Sequence[Tensor] = (),
    ) -> None:
        kernel()

    def start_collective(
        self,
        start: Callable[[bool], Any],
        *,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
    ) -> None:
        start(False)

    def flush(self) -> None:
        """Everything is with the device already."""

    def record_stream(self, tensor: Tensor, stream: Any) -> None:
        if self._device.is_on_device(tensor):
            self._device.record_stream(tensor, stream)

    def alloc_storage(self, tensor: Tensor, numel: int) -> None:
        if tensor.untyped_storage().nbytes() != numel * tensor.element_size():
            self._device.resize(tensor, numel)

    def free_storage(self, tensor: Tensor) -> None:
        if tensor.untyped_storage().nbytes():
            self._device.resize(tensor, 0)

    def pin(self, tensor: Tensor) -> Tensor:
        pinned = self._device.pinned(tensor.numel(), tensor.dtype).view(tensor.shape)
        return pinned.copy_(tensor)


class DdpHandle(StreamDeviceHandle):
    """As the handle of an accelerator, with the simulated streams."""

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__(torch.device("cpu"))
        self._simulated = device

    def mark(self) -> Mark:
        return HostMark()

    def pinned_like(self, host: Tensor) -> Tensor:
        return self._simulated.pinned(host.numel(), host.dtype).view(host.shape)

    def new_stream(self) -> SimulatedStream:
        return self._simulated.new_stream()

    def current_stream(self) -> SimulatedStream:
        return self._simulated.current_stream()

    def use_stream(self, stream: Any) -> AbstractContextManager[Any]:
        return self._simulated.use_stream(stream)

    def record_event(self) -> SimulatedEvent:
        return self._simulated.current_stream().record_event()

    def new_future(self) -> SimulatedFuture:
        return SimulatedFuture(self._simulated)
