"""Staging of CUDA tensors through pinned host memory, on side streams, with events and segments.

    caller's stream    ...kernels --+                                        +-- wait --> kernels...
                                    | issued                                 | arrived
    down                            +--> device to host --+                  |
                                                          | fetched          |
    host                                                  +--> exchange --+  |
    up                                                                    +--> host to device

[Note: Order on a device]
* The copies to the host come after what the caller's stream held at the call (`issued`), and so do
  those to the device: the caller's kernels may still read what a result will replace.
* The host exchanges what has been fetched; it waits for that event alone.
* Waiting for the operation, on whatever stream is current then, makes that stream wait for the last
  copy to the device (`arrived`). The caller's stream never waits for the host.
* The operation is completed when the device has passed `arrived`, a little after `wait` may return.
* Callbacks of the operation's future run with `up` as the current stream.
* The allocator learns of each tensor that a side stream uses, so the caller may drop it at once.

[Note: Segments]
A large tensor is fetched in segments, each with an event. A communicator that takes a `Pace` starts
with the first segment while the next ones are still on their way, and hands back finished segments
while it goes on with the next: copies and exchange overlap. Nothing of this shows to other ranks,
which may hold their tensors elsewhere.

Kept apart from the CPU path, so that it costs that path nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from impl.device import DeviceHandle, Event
from impl.gloo.memory import dense
from impl.gloo.memory.staging import Lender

# Many times what the copy engine moves while the host starts the next copy: 10 us at 20 GB/s.
SEGMENT_NBYTES = 4 << 20

_HIGH_PRIORITY = -1  # the copies are short, and other ranks wait for them


class StagingStreams:
    """The side streams of one device.

    down: the stream of copies to the host. up: the stream of copies to the device. All operations
    of the process share them: copies in one direction share one engine anyway.
    """

    def __init__(self, device: DeviceHandle) -> None:
        self.down = device.new_stream(_HIGH_PRIORITY)
        self.up = device.new_stream(_HIGH_PRIORITY)


_streams: weakref.WeakKeyDictionary[DeviceHandle, StagingStreams] = weakref.WeakKeyDictionary()


def streams_of(device: DeviceHandle) -> StagingStreams:
    if device not in _streams:
        _streams.setdefault(device, StagingStreams(device))
    return _streams[device]


class CudaLender(Lender):
    """Lends pinned memory for tensors on one GPU."""

    has_streams = True

    def __init__(self, device: DeviceHandle) -> None:
        super().__init__()
        self._device = device
        self._down, self._up = streams_of(device).down, streams_of(device).up
        self._issued = device.current_stream().record_event()
        self._down.wait_event(self._issued)
        self._fetched: Event | None = None  # all that was to be read
        self._arrived: Any = None  # all results; None if there are none
        self._segments: list[tuple[int, Event]] = []  # of the last tensor: stop, when fetched
        self._pace: SegmentPace | None = None
        self._fresh: list[Tensor] = []  # what `up` allocated for the caller

    def read(self, tensor: Tensor) -> Tensor:
        device = self._device
        with device.use_stream(self._down):
            host = self._pinned_like(tensor)
            self._fetch(host, dense.flat(tensor))
            device.record_stream(tensor, self._down)
        return host

    def _fetch(self, host: Tensor, source: Tensor) -> None:
        segment_numel = SEGMENT_NBYTES // source.itemsize
        self._segments = []
        for start in range(0, max(1, source.numel()), segment_numel):
            stop = min(source.numel(), start + segment_numel)
            host[start:stop].copy_(source[start:stop], non_blocking=True)
            self._fetched = self._down.record_event()
            self._segments.append((stop, self._fetched))

    def room(self, tensor: Tensor) -> Tensor:
        device = self._device
        with device.use_stream(self._down):  # pinned memory belongs to the device's context
            return self._owe(self._pinned_like(tensor), tensor)

    def update(self, tensor: Tensor) -> Tensor:
        return self._owe(self.read(tensor), tensor)

    def _owe(self, memory: Tensor, tensor: Tensor) -> Tensor:
        self.expect_write(tensor)
        self.expect_write(memory)
        self._owed.append((memory, tensor))
        return memory

    def _pinned_like(self, tensor: Tensor) -> Tensor:
        return self._device.pinned(*dense.numbers_of(tensor))

    def pace(self) -> SegmentPace | None:
        """The pace of an operation that goes through one tensor from front to back.

        The operation then waits for what it reads; `prepare` does not.
        """
        if len(self._owed) == 1 and len(self._segments) > 1:
            memory, tensor = self._owed[0]
            if dense.flat_shares_memory(tensor):
                target = dense.flat(tensor)
                self._pace = SegmentPace(self._device, memory, target, self._segments)
        return self._pace

    def prepare(self) -> None:
        if self._fetched is not None and self._pace is None:
            self._fetched.synchronize()

    def on_device(self) -> AbstractContextManager[Any]:
        return self._device.use_stream(self._up)

    def give_back(self) -> None:
        device = self._device
        if self._pace is not None:
            self._pace.finish()
        if not self._owed and not self._fresh:
            return
        self._up.wait_event(self._issued)
        with device.use_stream(self._up):
            for host, tensor in self._owed:
                if self._pace is None:
                    tensor.data.copy_(dense.shaped(host, tensor), non_blocking=True)
                device.record_stream(tensor, self._up)
            self._arrived = self._up.record_event()

    def _run(self, operation: Callable[[], None]) -> None:
        try:
            super()._run(operation)
        except BaseException:
            if self._pace is not None and self._fetched is not None:
                # parts of the tensor may be on their way, and nothing will wait for them
                self._fetched.synchronize()
                self._up.record_event().synchronize()
            raise

    def give_sparse(self, result: Tensor, tensors: list[Tensor]) -> Tensor:
        # their sum was fetched, so what the caller's stream held at the call is over
        device = self._device
        with device.use_stream(self._up):
            values = self._to_device(result.values(), tensors[0])
            moved = torch.sparse_coo_tensor(
                self._to_device(result.indices(), tensors[0]),
                values,
                result.shape,
                device=values.device,
                is_coalesced=True,
                check_invariants=False,
            )
            for tensor in tensors:
                device.record_stream(tensor, self._up)
                with torch.no_grad():
                    tensor.copy_(moved)
            self._fresh += [moved, *tensors]
        return moved

    def _to_device(self, host: Tensor, like: Tensor) -> Tensor:
        pinned = self._device.pinned(host.numel(), host.dtype).view(host.shape)
        pinned.copy_(host)
        return torch.empty(host.shape, dtype=host.dtype, device=like.device).copy_(
            pinned, non_blocking=True
        )

    def has_arrived(self) -> bool:
        return self._arrived is None or bool(self._arrived.query())

    def synchronize(self) -> None:
        if self._arrived is None:
            return
        current = self._device.current_stream()
        current.wait_event(self._arrived)
        for tensor in self._fresh:
            # allocated on `up`, and from now on used here
            self._device.record_stream(tensor, current)

    def new_future(self) -> torch.futures.Future[Any]:
        return self._device.new_future()


class SegmentPace:
    """Copies of one tensor while a communicator works on it. See [Note: Segments]."""

    def __init__(
        self,
        device: DeviceHandle,
        memory: Tensor,
        target: Tensor,
        segments: list[tuple[int, Event]],
    ) -> None:
        """memory, target: (numel,), the host's and the device's. segments: as fetched."""
        self._device = device
        self._memory = memory
        self._target = target
        self._waiting = list(reversed(segments))
        self._fetched_stop = 0
        self._sent_stop = 0

    def will_read(self, stop: int) -> None:
        """Wait until the elements before `stop` have been fetched."""
        while self._fetched_stop < stop:
            self._fetched_stop, fetched = self._waiting.pop()
            fetched.synchronize()

    def has_written(self, stop: int) -> None:
        """The elements before `stop` are final: send back what makes a segment."""
        if (stop - self._sent_stop) * self._memory.itemsize >= SEGMENT_NBYTES:
            self._send(stop)

    def finish(self) -> None:
        """All elements are final."""
        if self._sent_stop < self._memory.numel():
            self._send(self._memory.numel())

    def _send(self, stop: int) -> None:
        # what the caller's stream held at the call came before the copy that was fetched
        device, start = self._device, self._sent_stop
        with device.use_stream(streams_of(device).up):
            self._target[start:stop].copy_(self._memory[start:stop], non_blocking=True)
        self._sent_stop = stop
