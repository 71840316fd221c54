"""Mutants of conformance/spec/collectives/scatters.py."""

from __future__ import annotations

from typing import Any

from impl.gloo import ProcessGroupGloo
from tests.mutants.kit import ForwardingGroup, GroupMutant, breaks


@breaks("reduce_scatter/sum", says=r"rank 0 is wrong")
class ReduceScattersTheNextRanksPart(ForwardingGroup):
    """Rank r gets the part of rank r + 1."""

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        return super().reduce_scatter(outputs, [[*inputs[0][1:], inputs[0][0]]], opts)


@breaks("reduce_scatter/uneven", says=r"sizes of the list differ")
class ReduceScattersEqualParts(ForwardingGroup):
    """Cuts one buffer into equal parts, and refuses others."""

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        if len({part.numel() for part in inputs[0]}) > 1:
            raise RuntimeError("the sizes of the list differ")
        return super().reduce_scatter(outputs, inputs, opts)


@breaks("reduce_scatter_tensor/concatenated", says=r"rank 0 is wrong")
class ReduceScattersTheNextBlock(ForwardingGroup):
    """Rank r gets the block of rank r + 1."""

    def reduce_scatter_single(self, output: Any, tensor: Any, opts: Any) -> Any:
        rolled = tensor.roll(-tensor.shape[0] // self.size(), 0)
        return super().reduce_scatter_single(output, rolled, opts)


@breaks(
    "reduce_scatter_tensor/zero-dimensional", says=r"rank 1 is wrong[\s\S]*got 30\.0, want 33\.0"
)
class ZeroDimensionalOutputsGetTheFirstPart(GroupMutant, ProcessGroupGloo):
    """Rank r's part begins after r rows of the output, and a zero-dimensional output has no
    rows."""

    base = "impl"

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        if output.dim() == 0:
            input = input[:1].expand(input.shape).contiguous()
        return super().reduce_scatter_single(output, input, opts)
