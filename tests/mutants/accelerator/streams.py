"""Mutants of conformance/spec/accelerator/streams.py."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from unittest import mock

from torch import Tensor

from impl.gloo.memory.cuda_staging import CudaLender
from impl.testing.device.handles import SimulatedHandle
from impl.testing.device.memory import Memory
from impl.testing.device.schedule import KernelSchedule
from impl.testing.device.simulated import SimulatedDevice, SimulatedStream
from tests.impl.device.targets import simulated_device
from tests.mutants.accelerator.kit import (
    OnADevice,
    a_copy_to_the_host_waits_for_nothing,
    is_staging,
    never,
    on_a_device_with,
    unless,
)
from tests.mutants.kit import breaks


class Strict(SimulatedDevice):
    """Raises what it finds at an allocation, where the program can hear of it."""

    def allocate(self, tensor: Tensor, index: int | None = None) -> Memory | None:
        memory = super().allocate(tensor, index)
        if self.findings:
            raise AssertionError(self.findings[0].text)
        return memory


@breaks("cuda/reads-after-the-stream", says=r"rank \d is wrong")
class ReadsTooEarly(OnADevice):
    """The copy to the host does not wait for the kernels before the call."""

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        with a_copy_to_the_host_waits_for_nothing():
            yield


@breaks("cuda/writes-after-the-stream", says=r"rank \d is wrong")
class WritesTooEarly(OnADevice):
    """The copy to the device does not wait for the kernels before the call."""

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        with on_a_device_with(unless(SimulatedStream, "wait_event", is_staging("up"))):
            yield


class ForgetsWaiting(OnADevice):
    """A wait for an operation makes the caller's stream wait for nothing."""

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        with on_a_device_with(never(CudaLender, "synchronize"), schedule=KernelSchedule):
            yield


@breaks("cuda/after-the-call", says=r"rank \d is wrong")
@breaks("cuda/after-the-wait", says=r"rank \d is wrong")
class ForgetsWaitingForCollectives(ForgetsWaiting):
    pass


@breaks("cuda/reuse-after-the-call", says=r"rank \d is wrong")
class DoesNotWaitForItsCopies(OnADevice):
    """The host continues before the inputs have been copied to it."""

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        with on_a_device_with(never(CudaLender, "prepare")):
            yield


@breaks("cuda/dropped-tensors", says=r"gets memory again that .* still uses")
class TellsTheAllocatorNothing(OnADevice):
    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        with simulated_device(Strict()), never(SimulatedHandle, "record_stream"):
            yield


@breaks("cuda/futures", says=r"rank \d is wrong")
class ResolvesOnAnyStream(OnADevice):
    """Callbacks come after whatever the worker's own stream holds, which is nothing."""

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        def on_device(lender: CudaLender) -> AbstractContextManager[None]:
            return contextlib.nullcontext()

        wrong = mock.patch.object(CudaLender, "on_device", on_device)
        with on_a_device_with(wrong, schedule=KernelSchedule):
            yield


@breaks("cuda/several-in-flight", says=r"rank \d is wrong")
class ForgetsOneOfSeveral(OnADevice):
    """Of several pending operations, the one that is waited for first is not waited for."""

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        waited: list[CudaLender] = []

        def is_first(lender: CudaLender) -> bool:
            waited.append(lender)
            return lender is waited[0]

        with on_a_device_with(unless(CudaLender, "synchronize", is_first), schedule=KernelSchedule):
            yield
