"""The reference implementation on a simulated device, as a target of the suite."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

from torch import Tensor

from conformance.spec.accelerator import stream_work as streams
from conformance.target import Target, load_target
from impl.gloo.connect.transports import GroupPlace, connect
from impl.gloo.options import Options
from impl.gloo.queue.issuing import GroupCore
from impl.testing.device.schedule import Drawn
from impl.testing.device.simulated import SimulatedDevice, SimulatedStream
from impl.testing.device.watched_gloo import WatchedCommunicator, simulated_gloo


class SimulatedStreams:
    """The simulated device as cases have theirs."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device

    def new(self) -> SimulatedStream:
        stream = self._device.new_stream()
        stream.wait_stream(self._device.current_stream())
        return stream

    def current(self) -> SimulatedStream:
        return self._device.current_stream()

    def use(self, stream: Any) -> AbstractContextManager[None]:
        return self._device.use_stream(stream)

    def follow(self, stream: Any) -> None:
        self._device.current_stream().wait_stream(stream)

    def uses(self, tensor: Tensor, stream: Any) -> None:
        self._device.record_stream(tensor, stream)

    def delay(self) -> None:
        """The schedule delays what it likes."""

    def put(self, values: Tensor) -> Tensor:
        return self._device.copied(values)

    def get(self, tensor: Tensor) -> Tensor:
        return self._device.fetch(tensor)


@contextlib.contextmanager
def on_simulated_device() -> Iterator[None]:
    """What a rank does inside happens on a device of its own; findings are an error."""
    device = SimulatedDevice(Drawn(random.getrandbits(32)))
    with simulated_device(device):
        yield
    if device.findings:
        raise AssertionError("\n".join(map(str, device.findings)))


@contextlib.contextmanager
def simulated_device(device: SimulatedDevice) -> Iterator[None]:
    """`impl` and the cases on this device."""

    def connect_watched(group: GroupCore, place: GroupPlace, options: Options) -> Any:
        return WatchedCommunicator(connect(place, options), device)

    with contextlib.ExitStack() as stack:
        for context in (
            simulated_gloo(device),
            streams.stand_in(lambda: SimulatedStreams(device)),
            mock.patch.object(GroupCore, "_connect", connect_watched),
            device,
        ):
            stack.enter_context(context)
        yield


def simulated() -> Target:
    """`impl` on the simulated device."""
    return replace(
        load_target("impl"),
        name="impl on a simulated device",
        activate=f"{__name__}:{on_simulated_device.__name__}",
    )
