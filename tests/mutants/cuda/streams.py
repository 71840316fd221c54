"""Stream order that is forgotten, shown on a simulated device.

Each fault is the reference implementation on a device that executes side streams at once and the
caller's as late as possible, or everything as late as possible: what does not wait for the caller,
or does not make it wait, is seen in the results. Of `cuda/mixed-devices` and `cuda/other-device`
there is no fault: the simulated device's memory is the host's, so nothing can break them here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from conformance.target import Target, load_target
from impl.gloo.memory.cuda_staging import CudaLender, SegmentPace
from impl.testing.device.gloo import GlooHandle
from impl.testing.device.handles import DdpHandle
from impl.testing.device.memory import Memory
from impl.testing.device.schedule import Schedule, SideStreamsFirst
from impl.testing.device.simulated import SimulatedDevice, SimulatedStream
from tests.mutants.kit import Patch, breaks
from tests.impl.device.targets import simulated_device


@contextmanager
def on_a_device_with(
    *patches: AbstractContextManager[Any], schedule: type[Schedule] = SideStreamsFirst
) -> Iterator[None]:
    """On the simulated device, with something wrong."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(simulated_device(SimulatedDevice(schedule())))
        for patch in patches:
            stack.enter_context(patch)
        yield


def never(owner: Any, name: str) -> AbstractContextManager[Any]:
    """A method that does nothing; no mock, which would keep all tensors that it is given."""
    return unless(owner, name, lambda *args: True)


def unless(owner: Any, name: str, forgotten: Callable[..., bool]) -> AbstractContextManager[Any]:
    """A method that does nothing for some arguments."""
    right = getattr(owner, name)

    def method(*args: Any, **kwargs: Any) -> Any:
        return None if forgotten(*args) else right(*args, **kwargs)

    return mock.patch.object(owner, name, method)


class Strict(SimulatedDevice):
    """Raises what it finds at an allocation, where the program can hear of it."""

    def allocate(self, tensor: Tensor) -> Memory | None:
        memory = super().allocate(tensor)
        if self.findings:
            raise AssertionError(self.findings[0].text)
        return memory


class OnADevice(Patch):
    """A fault of `impl` there."""

    base = "impl"


@breaks("cuda/values", says=r"bfloat16.*\n?.*rank \d is wrong|rank \d is wrong")
class KeepsNarrowResults(OnADevice):
    """Results of a narrow type never come back to the device."""

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        def narrow(lender: CudaLender) -> bool:
            return any(tensor.dtype == torch.bfloat16 for _, tensor in lender._owed)

        with on_a_device_with(unless(CudaLender, "give_back", narrow)):
            yield


@breaks("cuda/strided", says=r"is wrong")
class FillsDenseTensorsOnly(OnADevice):
    """Views with gaps do not get their results."""

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        def strided(lender: CudaLender) -> bool:
            return any(not tensor.is_contiguous() for _, tensor in lender._owed)

        with on_a_device_with(unless(CudaLender, "give_back", strided)):
            yield


@breaks("cuda/large", says=r"wrong, second and last element")
class ForgetsTheLastSegment(OnADevice):
    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        with on_a_device_with(never(SegmentPace, "finish")):
            yield


@breaks("cuda/sparse", says=r"rank \d is wrong")
class KeepsSparseSums(OnADevice):
    """The sum is there, and not in the tensor that was passed."""

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        def give_sparse(lender: CudaLender, result: Tensor, tensors: list[Tensor]) -> Tensor:
            return result

        with on_a_device_with(mock.patch.object(CudaLender, "give_sparse", give_sparse)):
            yield


def _is(name: str) -> Callable[..., bool]:
    return lambda stream, *_: stream.name == name


def _a_copy_to_the_host_waits_for_nothing() -> AbstractContextManager[None]:
    return on_a_device_with(unless(SimulatedStream, "wait_event", _is("down")))


@breaks("cuda/reads-after-the-stream", says=r"rank \d is wrong")
class ReadsTooEarly(OnADevice):
    """The copy to the host does not wait for the kernels before the call."""

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        with _a_copy_to_the_host_waits_for_nothing():
            yield


@breaks("cuda/messages", says=r"what was received: rank \d is wrong")
class SendsTooEarly(OnADevice):
    """The same for messages."""

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        with _a_copy_to_the_host_waits_for_nothing():
            yield


@breaks("cuda/writes-after-the-stream", says=r"rank \d is wrong")
class WritesTooEarly(OnADevice):
    """The copy to the device does not wait for the kernels before the call."""

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        with on_a_device_with(unless(SimulatedStream, "wait_event", _is("up"))):
            yield


class ForgetsWaiting(OnADevice):
    """Whoever waits for an operation has its stream wait for nothing."""

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        with on_a_device_with(never(CudaLender, "synchronize"), schedule=Schedule):
            yield


@breaks("cuda/after-the-call", says=r"rank \d is wrong")
class ForgetsWaitingAfterCalls(ForgetsWaiting):
    pass


@breaks("cuda/after-the-wait", says=r"rank \d is wrong")
class ForgetsWaitingForWorks(ForgetsWaiting):
    pass


@breaks("cuda/sync-batchnorm", says=r"output: rank \d is wrong")
class NormalisesItsOwnBatch(Patch):
    """Not a matter of streams: the statistics are those of the rank's own batch."""

    @classmethod
    def target(cls) -> Target:
        layer = "torch.nn:BatchNorm1d"
        return replace(load_target("impl"), name=cls.__name__, sync_batchnorm=layer)


@breaks("cuda/reuse-after-the-call", says=r"rank \d is wrong")
class DoesNotWaitForItsCopies(OnADevice):
    """The host goes on before the inputs have come to it."""

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
        with simulated_device(Strict()), never(GlooHandle, "record_stream"):
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
        with on_a_device_with(wrong, schedule=Schedule):
            yield


@breaks("cuda/several-in-flight", says=r"rank \d is wrong")
class ForgetsOneOfSeveral(OnADevice):
    """Of several operations the one that is waited for first is not."""

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        waited: list[CudaLender] = []

        def is_first(lender: CudaLender) -> bool:
            waited.append(lender)
            return lender is waited[0]

        with on_a_device_with(unless(CudaLender, "synchronize", is_first), schedule=Schedule):
            yield


class DoesNotOrderFutures(OnADevice):
    """DDP hands out what a future holds before its stream has it."""

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        def new_future(handle: GlooHandle) -> torch.futures.Future[Any]:
            return torch.futures.Future()

        wrong = mock.patch.object(GlooHandle, "new_future", new_future)
        with on_a_device_with(wrong, schedule=Schedule):
            yield


@breaks("cuda/ddp", says=r"rank \d is wrong")
class DdpForgetsWaiting(DoesNotOrderFutures):
    pass


@breaks("cuda/ddp-on-a-side-stream", says=r"rank \d is wrong")
class DdpForgetsWaitingOnASideStream(DoesNotOrderFutures):
    pass


@breaks("cuda/checkpointing", says=r"rank \d is wrong")
class DdpForgetsWaitingForCheckpoints(DoesNotOrderFutures):
    pass


@breaks("cuda/ddp-unused", says=r"a gradient of what no rank used")
class CopiesALivingMap(OnADevice):
    """The map of used parameters is copied from the memory that is cleared for the next pass."""

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        def copy_from_host(handle: DdpHandle, host: Tensor, target: Tensor) -> None:
            pinned = handle.pinned_like(host)  # of which nothing has been written
            target.copy_(pinned, non_blocking=True)

        with on_a_device_with(mock.patch.object(DdpHandle, "copy_from_host", copy_from_host)):
            yield


@breaks("cuda/fsdp", says=r"rank \d is wrong")
class ComputesBeforeTheGather(OnADevice):
    """The caller's stream waits for no other one."""

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        with on_a_device_with(
            unless(SimulatedStream, "wait_stream", _is("default")),
            never(CudaLender, "synchronize"),
            schedule=Schedule,
        ):
            yield


@breaks("cuda/fsdp-offload", says=r"rank \d is wrong")
class StepsBeforeTheCopies(OnADevice):
    """The optimizer runs on the host before gradients have come there."""

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        with on_a_device_with(never(SimulatedStream, "synchronize"), schedule=Schedule):
            yield
