"""Helpers that mutants of several chapters of cuda share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch

from impl.device import handle_for
from impl.gloo.memory.cuda_staging import streams_of
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


def is_default(stream: SimulatedStream, *_: Any) -> bool:
    return stream.name == "default"


def is_staging(direction: str) -> Callable[..., bool]:
    """Whether a stream is the one of copies in this direction, "down" to the host or "up"."""

    def check(stream: SimulatedStream, *_: Any) -> bool:
        staging = streams_of(handle_for(torch.device("cpu")))
        return stream is getattr(staging, direction)

    return check


def a_copy_to_the_host_waits_for_nothing() -> AbstractContextManager[None]:
    return on_a_device_with(unless(SimulatedStream, "wait_event", is_staging("down")))
