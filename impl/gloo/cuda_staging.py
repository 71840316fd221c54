"""Tensors on a GPU: through pinned memory on the host, on a side stream, ordered by events.

    caller's stream   ...kernels ---+                              +--- wait ---> kernels...
                                    | event                        | event
    side stream                     +-> device to pinned host      +-> pinned host to device
                                                     |             |
    host thread                                      +-- exchange -+

The host never waits for the caller's stream as a whole, and the caller's stream never waits for the
host: `synchronize` makes it wait for the copies back. Kept apart from the CPU path, so that it
costs that path nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from impl.gloo import dense
from impl.gloo.lending import Lender

_HIGH_PRIORITY = -1  # the copies are short, and other ranks wait for them


class CudaLender(Lender):
    """Lends pinned memory for tensors on one GPU."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=_HIGH_PRIORITY)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        self._arrived: torch.cuda.Event | None = None

    def read(self, tensor: Tensor) -> Tensor:
        host = self._pinned_like(tensor)
        with torch.cuda.stream(self._stream):
            host.copy_(dense.flat(tensor), non_blocking=True)
        # the caller may free the tensor before the side stream has read it
        tensor.record_stream(self._stream)
        return host

    def room(self, tensor: Tensor) -> Tensor:
        return self._owe(self._pinned_like(tensor), tensor)

    def update(self, tensor: Tensor) -> Tensor:
        return self._owe(self.read(tensor), tensor)

    def _owe(self, memory: Tensor, tensor: Tensor) -> Tensor:
        self.needs_inference_mode |= tensor.is_inference()
        self._owed.append((memory, tensor))
        return memory

    def _pinned_like(self, tensor: Tensor) -> Tensor:
        numel = tensor.numel() * (2 if tensor.is_complex() else 1)
        dtype = tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype
        return torch.empty(numel, dtype=dtype, pin_memory=True)

    def prepare(self) -> None:
        self._stream.synchronize()

    def on_device(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def give_back(self) -> None:
        with torch.cuda.stream(self._stream):
            for host, tensor in self._owed:
                if tensor.is_complex():
                    value = torch.view_as_complex(host.view(*tensor.shape, 2))
                else:
                    value = host.view(tensor.shape)
                tensor.data.copy_(value, non_blocking=True)
                tensor.record_stream(self._stream)
            self._arrived = torch.cuda.Event()
            self._arrived.record(self._stream)
        # a future's callbacks run on this thread's stream
        torch.cuda.current_stream(self._device).wait_event(self._arrived)

    @property
    def synchronize(self) -> Callable[[], None]:
        return self._synchronize

    def _synchronize(self) -> None:
        if self._arrived is not None:
            torch.cuda.current_stream(self._device).wait_event(self._arrived)
