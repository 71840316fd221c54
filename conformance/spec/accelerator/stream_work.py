"""Streams for cases, with delayed kernels: of an accelerator, a simulated device, or none (CPU).

A case about stream order makes work late on purpose: what must wait for it then has something to
wait for. On a host everything is done at once, and a case only shows that it can be followed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from conformance import Me
from conformance.harness import devices

# Some ten milliseconds on a large GPU, much longer than any copy of a case takes.
_BUSY_MATRIX = 2048
_BUSY_PRODUCTS = 40
# Of a device that is much slower, and takes long enough for a single product of this size.
_SLOW_MATRIX = 512
_SLOW_S = 0.002


class Streams(Protocol):
    """What cases ask of a device."""

    def new(self) -> Any:
        """A stream that is ordered after what the current one holds."""

    def current(self) -> Any:
        """The stream on which the next kernel is put."""

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        """Inside, `stream` is the current one."""

    def follow(self, stream: Any) -> None:
        """What comes on the current stream waits for what `stream` holds."""

    def uses(self, tensor: Tensor, stream: Any) -> None:
        """Tell the allocator that `stream` uses a tensor of another stream."""

    def delay(self) -> None:
        """Keep the current stream busy for a while."""

    def put(self, values: Tensor) -> Tensor:
        """The values on the device, as of the current stream."""

    def get(self, tensor: Tensor) -> Tensor:
        """The values on the host, as of the current stream."""


class OfHost:
    """No streams: everything is done when the call returns."""

    def new(self) -> Any:
        return None

    def current(self) -> Any:
        return None

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def follow(self, stream: Any) -> None:
        """Done already."""

    def uses(self, tensor: Tensor, stream: Any) -> None:
        """No other tensor can get its memory."""

    def delay(self) -> None:
        """Nothing runs later."""

    def put(self, values: Tensor) -> Tensor:
        return values.clone()

    def get(self, tensor: Tensor) -> Tensor:
        return tensor.clone()


class OfDevice(OfHost):
    """A device without streams of one's own: kernels run one after the other, maybe later."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._busy = _busy_with(device)

    def delay(self) -> None:
        rows, count = self._busy
        matrix = torch.ones(rows, rows, device=self._device)
        for _ in range(count):
            torch.mm(matrix, matrix)

    def put(self, values: Tensor) -> Tensor:
        return values.to(self._device, copy=True)

    def get(self, tensor: Tensor) -> Tensor:
        return tensor.cpu()


@cache
def _busy_with(device: torch.device) -> tuple[int, int]:
    """Rows of a square matrix, and how many products of it keep the device busy."""
    matrix = torch.ones(_SLOW_MATRIX, _SLOW_MATRIX, device=device)
    torch.mm(matrix, matrix)[0, 0].item()  # the first one may take longer
    began_at = time.perf_counter()
    torch.mm(matrix, matrix)[0, 0].item()
    is_slow = time.perf_counter() - began_at > _SLOW_S
    return (_SLOW_MATRIX, 5) if is_slow else (_BUSY_MATRIX, _BUSY_PRODUCTS)


class OfAccelerator(OfDevice):
    """One device whose module has streams, as `torch.cuda` has them."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._module = torch.get_device_module(device)

    def new(self) -> Any:
        stream = self._module.Stream(self._device)
        stream.wait_stream(self.current())
        return stream

    def current(self) -> Any:
        return self._module.current_stream(self._device)

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        entered: AbstractContextManager[Any] = self._module.stream(stream)
        return entered

    def follow(self, stream: Any) -> None:
        self.current().wait_stream(stream)

    def uses(self, tensor: Tensor, stream: Any) -> None:
        tensor.record_stream(stream)


_stand_in: Callable[[], Streams] = OfHost


@contextlib.contextmanager
def stand_in(make: Callable[[], Streams]) -> Iterator[None]:
    """Inside, ranks on the CPU have these streams."""
    global _stand_in
    before, _stand_in = _stand_in, make
    try:
        yield
    finally:
        _stand_in = before


def streams_of(me: Me) -> Streams:
    """The streams of a rank's device."""
    if me.device.type == devices.HOST:
        return _stand_in()
    return (OfAccelerator if devices.has_streams(me.device.type) else OfDevice)(me.device)


def put_module(streams: Streams, module: nn.Module) -> nn.Module:
    """The same module, with its parameters and buffers on the device."""
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = streams.put(tensor.data)
    return module
