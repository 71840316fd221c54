"""A future with streams, as `torch.futures.Future(devices=...)` is on a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from impl.testing.device.simulated import SimulatedDevice, SimulatedEvent, SimulatedStream


class SimulatedFuture(torch.futures.Future[Any]):
    """A wait makes the current stream wait for the stream that set the result.

    Callbacks run on a stream of their own that comes after it. index: of the device on which the
    result will lie, and whose streams these are.
    """

    def __init__(self, device: SimulatedDevice, index: int) -> None:
        super().__init__()
        self._device = device
        self._index = index
        self._resolved: SimulatedEvent | None = None
        self._tensors: list[torch.Tensor] = []

    def set_result(self, result: Any) -> None:
        """
        Raises:
            ValueError: the result lies on another device, which torch refuses with these words.
        """
        self._tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        other = {self._device.index_of(t) for t in self._tensors} - {None, self._index}
        if other:
            raise ValueError(
                f"The result contained tensors residing on device(s) {other} which are not among "
                f"the expected device(s) {self._index}"
            )
        self._note()
        super().set_result(result)

    def set_exception(self, result: Any) -> None:
        self._note()
        super().set_exception(result)

    def _note(self) -> None:
        self._resolved = self._device.new_event()
        self._resolved.record_here(self._index)

    def wait(self) -> Any:
        value = super().wait()
        self._hand_to(self._device.current_stream(self._index))
        return value

    def _hand_to(self, stream: SimulatedStream) -> None:
        assert self._resolved is not None
        self._resolved.order(stream)
        for tensor in self._tensors:
            self._device.tell_allocator(tensor, stream)

    def then(self, callback: Callable[[Any], Any]) -> Any:
        child = SimulatedFuture(self._device, self._index)

        def run(_: Any) -> None:
            stream = self._device.new_stream("callbacks", self._index)
            self._hand_to(stream)
            with self._device.seen(), self._device.use_stream(stream):
                try:
                    child.set_result(callback(self))
                except Exception as error:
                    child.set_exception(error)

        super().then(run)
        return child

    def add_done_callback(self, callback: Callable[[Any], Any]) -> None:
        self.then(callback)
