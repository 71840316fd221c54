"""Mutants of conformance/spec/collectives/coalesced_anywhere.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.power.handles import After
from tests.mutants.kit import ForwardingGroup, breaks


def after_spoiling(work: Any, tensors: list[Tensor]) -> After:
    """The last element of each is 1 when it is done."""

    def spoil() -> None:
        for x in tensors:
            x.view(-1)[-1:].fill_(1)

    return After(work, spoil)


@breaks("coalescing/any-situation", says=r"rank \d is wrong")
class SumsOfScalarsAreLostInAGroup(ForwardingGroup):
    """In a group of some ranks, a coalesced tensor without dimensions is left at 1."""

    def allreduce_coalesced(self, tensors: Any, opts: Any) -> Any:
        lost = [x for x in tensors if x.dim() == 0 and self.size() < dist.get_world_size()]
        return after_spoiling(super().allreduce_coalesced(tensors, opts), lost)


@breaks("coalescing/any-situation", says=r"rank \d is wrong")
class GathersOfDoublesAreSpoilt(ForwardingGroup):
    """The last element of coalesced gathers of float64 is 1."""

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, *rest: Any) -> Any:
        doubles = [x for x in outputs if x.dtype is torch.float64]
        work = super().all_gather_single_coalesced(outputs, inputs, *rest)
        return after_spoiling(work, doubles)


@breaks("coalescing/any-situation-nothing-else", says=r"the memory around the tensors")
class WritesBehindCoalescedScatters(ForwardingGroup):
    """Coalesced scatters fill the memory behind their outputs."""

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        work = super().reduce_scatter_single_coalesced(outputs, inputs, opts)

        def overwrite() -> None:
            for x in outputs:
                end = x.storage_offset() + x.numel()
                behind = x.untyped_storage().nbytes() // x.element_size() - end
                x.as_strided((behind,), (1,), end).zero_()

        return After(work, overwrite)


@breaks(
    "coalescing/sizes", says=r"Call\(op='all_gather_into_tensor', shape=\(16384,\)[^;]*is wrong in"
)
class LargeGathersAreSpoilt(ForwardingGroup):
    """The last element of coalesced gathers is 1 if each rank contributes 16,384 or more."""

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, *rest: Any) -> Any:
        large = [x for x, given in zip(outputs, inputs, strict=True) if given.numel() >= 1 << 14]
        return after_spoiling(super().all_gather_single_coalesced(outputs, inputs, *rest), large)


@breaks("coalescing/dtypes", says=r"dtype='bfloat16'[^;]*is wrong in")
class ScattersOfBfloat16AreSpoilt(ForwardingGroup):
    """The last element of coalesced scatters of bfloat16 is 1."""

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        spoilt = [x for x in outputs if x.dtype is torch.bfloat16]
        work = super().reduce_scatter_single_coalesced(outputs, inputs, opts)
        return after_spoiling(work, spoilt)
