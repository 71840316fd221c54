"""Mutants of conformance/spec/collectives/all_reduce.py."""

from __future__ import annotations

from typing import Any

import torch

from tests.mutants.collectives.kit import lose, through_float32, through_half
from tests.mutants.kit import ForwardingGroup, breaks


@breaks("all_reduce/sum", says=r"rank 0 is wrong")
class LeavesTheLastRankOut(ForwardingGroup):
    """The last rank contributes nothing."""

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        if self.rank() == self.size() - 1:
            tensors[0].zero_()
        return super().allreduce(tensors, opts)


@breaks("all_reduce/same-bits", says=r"rank 1 (is wrong|\(got\))")
class OneRankRoundsAgain(ForwardingGroup):
    """On rank 1, sums that are not whole are off by one unit in the last place."""

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        work = super().allreduce(tensors, opts)
        work.wait()
        if self.rank() == 1:
            for tensor in tensors:
                off = tensor * (1 + torch.finfo(tensor.dtype).eps)
                tensor.copy_(torch.where(tensor == tensor.trunc(), tensor, off))
        return work


@breaks(
    "all_reduce/rounding",
    says=r"the sum in float32: rank 0 is wrong\n\d+ of 1003 elements are too far off",
)
class SumsInHalfPrecision(ForwardingGroup):
    """float32 is converted to float16 for the sum."""

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        if tensors[0].dtype is torch.float32:
            tensors[0].copy_(tensors[0].half())
        return super().allreduce(tensors, opts)


@breaks("all_reduce/rounding", says=r"elements differ[\s\S]*error: 1 units in the last place")
class TruncatesWholeBlocks(ForwardingGroup):
    """float16 is summed in float32; whole blocks of eight sums are truncated, the rest is
    rounded."""

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        [x] = tensors
        if x.dtype is not torch.float16:
            return super().allreduce(tensors, opts)
        wide = x.float().flatten()
        work = super().allreduce([wide], opts)
        work.wait()
        rounded = wide.half()
        in_blocks = torch.arange(wide.numel()) < wide.numel() // 8 * 8
        too_far = in_blocks & (rounded.float().abs() > wide.abs())
        # The bits of a float16, less one, are those of its neighbour on the side of zero.
        cut = (rounded.view(torch.int16) - too_far.to(torch.int16)).view(torch.float16)
        x.copy_(cut.view(x.shape))
        return work


@breaks("all_reduce/rounding", says=r"\(524309,\), dtype='float32'[\s\S]*too far off")
class SumsManyInHalfPrecision(ForwardingGroup):
    """Large tensors of float32 are converted to float16 for the sum."""

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        if tensors[0].numel() > 1 << 16:
            lose(through_half, tensors)
        return super().allreduce(tensors, opts)


@breaks("all_reduce/rounding", says=r"\(524309,\), dtype='float64'[\s\S]*too far off")
class SumsManyInSinglePrecision(ForwardingGroup):
    """Large tensors of float64 are converted to float32 for the sum."""

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        if tensors[0].numel() > 1 << 16:
            lose(through_float32, tensors)
        return super().allreduce(tensors, opts)
