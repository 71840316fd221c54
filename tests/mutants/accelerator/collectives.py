"""Mutants of conformance/spec/accelerator/collectives.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from impl.gloo.memory.cuda_staging import CudaLender, SegmentPace
from tests.mutants.accelerator.kit import (
    OnADevice,
    a_copy_to_the_host_waits_for_nothing,
    never,
    on_a_device_with,
    unless,
)
from tests.mutants.kit import breaks


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
    """The sum is computed, but not written to the tensor that was passed."""

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        def give_sparse(lender: CudaLender, result: Tensor, tensors: list[Tensor]) -> Tensor:
            return result

        with on_a_device_with(mock.patch.object(CudaLender, "give_sparse", give_sparse)):
            yield


@breaks("cuda/messages", says=r"what was received: rank \d is wrong")
class SendsTooEarly(OnADevice):
    """The copy to the host for a send does not wait for the kernels before the call."""

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        with a_copy_to_the_host_waits_for_nothing():
            yield
