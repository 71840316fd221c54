"""Mutants of conformance/spec/accelerator/wrappers.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from conformance.target import Target, load_target
from impl.gloo.memory.cuda_staging import CudaLender
from impl.testing.device.handles import SimulatedHandle
from impl.testing.device.schedule import KernelSchedule
from impl.testing.device.simulated import SimulatedStream
from tests.mutants.accelerator.kit import OnADevice, is_default, never, on_a_device_with, unless
from tests.mutants.kit import Patch, breaks


@breaks("cuda/sync-batchnorm", says=r"output: rank \d is wrong")
class NormalisesItsOwnBatch(Patch):
    """The statistics are those of the rank's own batch."""

    @classmethod
    def target(cls) -> Target:
        layer = "torch.nn:BatchNorm1d"
        return replace(load_target("impl"), name=cls.__name__, sync_batchnorm=layer)


class DoesNotOrderFutures(OnADevice):
    """DDP hands out what a future holds before its stream has it."""

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        def new_future(handle: SimulatedHandle) -> torch.futures.Future[Any]:
            return torch.futures.Future()

        wrong = mock.patch.object(SimulatedHandle, "new_future", new_future)
        with on_a_device_with(wrong, schedule=KernelSchedule):
            yield


@breaks("cuda/ddp", says=r"rank \d is wrong")
@breaks("cuda/ddp-on-a-side-stream", says=r"rank \d is wrong")
@breaks("cuda/checkpointing", says=r"rank \d is wrong")
class WrappersForgetWaiting(DoesNotOrderFutures):
    pass


@breaks("cuda/ddp-unused", says=r"a gradient of what no rank used")
class CopiesALivingMap(OnADevice):
    """The map of used parameters is copied from the memory that is cleared for the next pass."""

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        def copy_from_host(handle: SimulatedHandle, host: Tensor, target: Tensor) -> None:
            unwritten = handle.pinned(host.numel(), host.dtype).view(host.shape)
            target.copy_(unwritten, non_blocking=True)

        with on_a_device_with(mock.patch.object(SimulatedHandle, "copy_from_host", copy_from_host)):
            yield


@breaks("cuda/fsdp", says=r"rank \d is wrong")
class ComputesBeforeTheGather(OnADevice):
    """The caller's stream waits for no other one."""

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        with on_a_device_with(
            unless(SimulatedStream, "wait_stream", is_default),
            never(CudaLender, "synchronize"),
            schedule=KernelSchedule,
        ):
            yield


@breaks("cuda/fsdp-offload", says=r"rank \d is wrong")
class StepsBeforeTheCopies(OnADevice):
    """The optimizer runs on the host before the gradients have been copied there."""

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        with on_a_device_with(never(SimulatedStream, "synchronize"), schedule=KernelSchedule):
            yield
