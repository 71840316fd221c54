"""`DeviceHandle` of the simulated device, for `impl` to use in place of CUDA."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from impl.device import HostMark, TimeMark
from impl.testing.device.future import SimulatedFuture
from impl.testing.device.simulated import SimulatedDevice, SimulatedEvent, SimulatedStream


class SimulatedHandle:
    """As `impl.device.DeviceHandle`: kernels go to the current stream as they come."""

    type = "cpu"
    has_streams = True

    def __init__(self, device: SimulatedDevice, index: int = 0) -> None:
        """index: of several devices, the one that this is the handle of."""
        self._device = device
        self._index = index

    def is_available(self) -> bool:
        return True

    def current_device(self) -> torch.device:
        index = self._device.current.device_index
        return torch.device("cpu", index) if index else torch.device("cpu")

    def ranks_per_node(self) -> int:
        return 2

    def holds(self, tensor: Tensor) -> bool:
        return self._device.is_on_device(tensor)

    def new_stream(self, priority: int = 0) -> SimulatedStream:
        return self._device.new_stream(index=self._index)

    def current_stream(self) -> SimulatedStream:
        return self._device.current_stream(self._index)

    @contextlib.contextmanager
    def use_stream(self, stream: Any) -> Iterator[None]:
        with self._device.seen(), self._device.use_stream(stream):
            yield

    def record_event(self) -> SimulatedEvent:
        return self.current_stream().record_event()

    def new_future(self) -> SimulatedFuture:
        return SimulatedFuture(self._device, self._index)

    def mark(self) -> TimeMark:
        return HostMark()

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
        return self.pinned(tensor.numel(), tensor.dtype).view(tensor.shape).copy_(tensor)

    def pinned(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self._device.pinned(numel, dtype)

    def copy_from_host(self, host: Tensor, target: Tensor) -> None:
        target.copy_(self.pin(host), non_blocking=True)
