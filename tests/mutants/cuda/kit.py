"""What mutants of several chapters of cuda share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

from impl.testing.device.schedule import KernelSchedule, SideStreamsFirst
from impl.testing.device.simulated import SimulatedDevice, SimulatedStream
from tests.impl.device.targets import simulated_device
from tests.mutants.kit import Patch


@contextmanager
def on_a_device_with(
    *patches: AbstractContextManager[Any], schedule: type[KernelSchedule] = SideStreamsFirst
) -> Iterator[None]:
    """On the simulated device, with something wrong."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(simulated_device(SimulatedDevice(schedule())))
        for patch in patches:
            stack.enter_context(patch)
        yield


def unless(owner: Any, name: str, forgotten: Callable[..., bool]) -> AbstractContextManager[Any]:
    """A method that does nothing for some arguments."""
    right = getattr(owner, name)

    def method(*args: Any, **kwargs: Any) -> Any:
        return None if forgotten(*args) else right(*args, **kwargs)

    return mock.patch.object(owner, name, method)


def never(owner: Any, name: str) -> AbstractContextManager[Any]:
    """A method that does nothing; no mock, which would keep all tensors that it is given."""
    return unless(owner, name, lambda *args: True)


class OnADevice(Patch):
    """A mutant of `impl` there."""

    base = "impl"


def is_for(name: str) -> Callable[..., bool]:
    return lambda stream, *_: stream.name == name


def a_copy_to_the_host_waits_for_nothing() -> AbstractContextManager[None]:
    return on_a_device_with(unless(SimulatedStream, "wait_event", is_for("down")))
