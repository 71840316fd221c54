"""A future with streams, as `torch.futures.Future(devices=...)` is on a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from impl.testing.device.simulated import SimulatedDevice, SimulatedEvent


class SimulatedFuture(torch.futures.Future[Any]):
    """A wait makes the current stream wait for the stream that set the result.

    Callbacks run on a stream of their own that comes after it.
    """

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__()
        self._device = device
        self._resolved: SimulatedEvent | None = None

    def set_result(self, result: Any) -> None:
        self._note()
        super().set_result(result)

    def set_exception(self, result: Any) -> None:
        self._note()
        super().set_exception(result)

    def _note(self) -> None:
        self._resolved = self._device.new_event()
        self._resolved.record_here()

    def wait(self) -> Any:
        value = super().wait()
        assert self._resolved is not None
        self._resolved.order(self._device.current_stream())
        return value

    def then(self, callback: Callable[[Any], Any]) -> Any:
        child = SimulatedFuture(self._device)

        def run(_: Any) -> None:
            assert self._resolved is not None
            stream = self._device.new_stream("callbacks")
            self._resolved.order(stream)
            with self._device.seen(), self._device.use_stream(stream):
                try:
                    child.set_result(callback(self))
                except Exception as error:
                    child.set_exception(error)

        super().then(run)
        return child

    def add_done_callback(self, callback: Callable[[Any], Any]) -> None:
        self.then(callback)
