"""Gathers and scatters in the forms that are less usual."""

from __future__ import annotations

from typing import Any

import torch

from impl.gloo import ProcessGroupGloo
from tests.mutants.kit import ForwardingGroup, GroupFault, breaks
from tests.mutants.replacing import Replacing


@breaks("all_gather/uneven", says=r"rank 0 is wrong\nat \[1\]")
class ForgetsThePadding(ForwardingGroup):
    """Tensors of different sizes are padded to the longest, and cut as if they had not been."""

    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        [wanted], [x] = outputs, inputs
        sizes = [y.numel() for y in wanted]
        if len(set(sizes)) == 1:
            return super().allgather(outputs, inputs, opts)
        padded = x.new_zeros(max(sizes))
        padded[: x.numel()] = x.flatten()
        gathered = [torch.empty_like(padded) for _ in sizes]
        work = super().allgather([gathered], [padded], opts)
        work.wait()
        for y, values in zip(wanted, torch.cat(gathered)[: sum(sizes)].split(sizes), strict=True):
            y.copy_(values.view(y.shape))
        return work


@breaks("all_gather_into_tensor/stacked", says=r"raised RuntimeError: .* 3 dimensions and one of 2")
@breaks("reduce_scatter_tensor/stacked", says=r"raised RuntimeError: .* 3 dimensions and one of 2")
class ConcatenatesAndNothingElse(GroupFault, ProcessGroupGloo):
    """One tensor for all ranks must have as many dimensions as that of one rank."""

    base = "impl"

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        self.compare(output, input)
        return super().all_gather_single(output, input, opts)

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        self.compare(input, output)
        return super().reduce_scatter_single(output, input, opts)

    def compare(self, of_all: torch.Tensor, of_one: torch.Tensor) -> None:
        if of_all.dim() != of_one.dim():
            raise RuntimeError(f"a tensor of {of_all.dim()} dimensions and one of {of_one.dim()}")


@breaks(
    "reduce_scatter_tensor/zero-dimensional", says=r"rank 1 is wrong[\s\S]*got 30\.0, want 33\.0"
)
class TakesTheFirstNumber(GroupFault, ProcessGroupGloo):
    """Rank r's part begins after r rows of the output, of which a number has none."""

    base = "impl"

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        if output.dim() == 0:
            input = input[:1].expand(input.shape).contiguous()
        return super().reduce_scatter_single(output, input, opts)


@breaks("all_gather_into_tensor/both-names", says=r"rank 0 is wrong")
@breaks("reduce_scatter_tensor/both-names", says=r"rank 0 is wrong")
class TheOldNamesAreLeftBehind(Replacing):
    """By their old names, the operations leave the result in a copy."""

    @staticmethod
    def all_gather_into_tensor(right: Any, output: Any, *args: Any, **how: Any) -> Any:
        return right(output.clone(), *args, **how)

    @staticmethod
    def reduce_scatter_tensor(right: Any, output: Any, *args: Any, **how: Any) -> Any:
        return right(output.clone(), *args, **how)


@breaks("gather/default-destination", says=r"raised ValueError: which rank")
@breaks("scatter/default-source", says=r"raised ValueError: which rank")
class RootsHaveNoDefault(Replacing):
    """gather and scatter want to be told the root, each by its own name."""

    @staticmethod
    def gather(right: Any, x: Any, xs: Any = None, dst: Any = None, *args: Any, **how: Any) -> Any:
        if dst is None and how.get("group_dst") is None:
            raise ValueError("which rank?")
        return right(x, xs, dst, *args, **how)

    @staticmethod
    def scatter(right: Any, x: Any, xs: Any = None, src: Any = None, *args: Any, **how: Any) -> Any:
        if src is None and how.get("group_src") is None:
            raise ValueError("which rank?")
        return right(x, xs, src, *args, **how)


@breaks("gather/complex", says=r"rank 0 is wrong\nat \[0\]")
class GathersRealParts(GroupFault, ProcessGroupGloo):
    base = "impl"

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return super().gather(outputs, [x.real.to(x.dtype) for x in inputs], opts)


@breaks("scatter/list-at-source-only", says=r"raised ValueError: every rank needs a list")
class ScatterNeedsListsEverywhere(Replacing):
    @staticmethod
    def scatter(right: Any, x: Any, xs: Any = None, *args: Any, **how: Any) -> Any:
        if xs is None:
            raise ValueError("every rank needs a list")
        return right(x, xs, *args, **how)
