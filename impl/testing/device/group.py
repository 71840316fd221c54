"""A process group on the simulated device with simulated other ranks.

They hold what this rank holds, so every result can be computed here: a sum is a multiple, a gather
repeats. Collectives run as those of NCCL do: a synchronous one on the current stream, an
asynchronous one on a stream of the group, which waiting orders the current stream after. The group
has a stream on each device. The host waits for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from impl.testing.device.future import SimulatedFuture
from impl.testing.device.simulated import SimulatedDevice, SimulatedEvent, SimulatedStream

_ProcessGroup: Any = dist.ProcessGroup


class ImaginedGroup(_ProcessGroup):  # type: ignore[misc]  # as Any: see impl.gloo.queue.issuing
    """Rank 0 of `world_size` ranks."""

    def __init__(self, device: SimulatedDevice, world_size: int, name: str = "imagined") -> None:
        _ProcessGroup.__init__(self, 0, world_size)
        self._device = device
        self._size = world_size
        self._streams: dict[int, SimulatedStream] = {}  # by device
        self._name = name

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return self._size

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        return "imagined"

    @property
    def group_name(self) -> str:
        return self._name

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        def run() -> None:
            for tensor in tensors:
                tensor.data.mul_(self._size)

        return self._issue(run, list(tensors), opts)

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        return self._issue(lambda: None, list(tensors), opts)

    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        def run() -> None:
            for tensors, own in zip(outputs, inputs, strict=True):
                for tensor in tensors:
                    tensor.data.copy_(own.data)

        return self._issue(run, [x for tensors in outputs for x in tensors], opts, *inputs)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        def run() -> None:
            rows = output.data.view(self._size, -1)
            rows.copy_(input.data.view(1, -1).expand_as(rows))

        return self._issue(run, [output], opts, input)

    _allgather_base = all_gather_single  # torch 2.11's name

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        def run() -> None:
            own = input.data.view(self._size, -1)[0]
            output.data.view(-1).copy_(own)
            output.data.mul_(self._size)

        return self._issue(run, [output], opts, input)

    _reduce_scatter_base = reduce_scatter_single  # torch 2.11's name

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._issue(lambda: None, [], opts)

    def _issue(
        self, run: Callable[[], None], outputs: list[Tensor], opts: Any, *inputs: Tensor
    ) -> dist.Work:
        device = self._device
        index = next(
            (device.index_of(tensor) or 0 for tensor in outputs), device.current.device_index
        )
        if not getattr(opts, "asyncOp", True):
            run()
            return ImaginedWork(device, index, None, outputs)
        stream = self._stream(index)
        before = device.new_event()
        before.record_here(index)
        before.order(stream)
        with device.use_stream(stream):
            run()
            for tensor in (*outputs, *inputs):
                device.tell_allocator(tensor, stream)
            done = device.new_event()
            done.record_here()
            future = SimulatedFuture(device, index)
            future.set_result(outputs)
        return ImaginedWork(device, index, (done, future), outputs)

    def _stream(self, index: int) -> SimulatedStream:
        if index not in self._streams:
            self._streams[index] = self._device.new_stream(f"of group {self._name}", index)
        return self._streams[index]


class ImaginedWork(dist.Work):
    """Of a collective that the device will have done some time."""

    def __init__(
        self,
        device: SimulatedDevice,
        index: int,
        pending: tuple[SimulatedEvent, SimulatedFuture] | None,
        outputs: list[Tensor],
    ) -> None:
        super().__init__()
        self._device = device
        self._index = index
        self._pending = pending
        self._outputs = outputs

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if self._pending is not None:
            self._pending[0].order(self._device.current_stream(self._index))
        return True

    def is_completed(self) -> bool:
        return self._pending is None or self._pending[0].query()

    def get_future(self) -> torch.futures.Future[Any]:
        if self._pending is not None:
            return self._pending[1]
        future = SimulatedFuture(self._device, self._index)
        future.set_result(self._outputs)
        return future
