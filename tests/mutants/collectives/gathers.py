"""Mutants of conformance/spec/collectives/gathers.py."""

from __future__ import annotations

from typing import Any

import torch

from impl.gloo import ProcessGroupGloo
from tests.mutants.kit import ForwardingGroup, GroupMutant, breaks
from tests.mutants.replacing import Replacing


@breaks("all_gather/values", says=r"rank 0 is wrong\nat \[0\]")
class AllGathersInReverse(ForwardingGroup):
    """The last rank's tensor comes first."""

    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        return super().allgather([list(reversed(outputs[0]))], inputs, opts)


@breaks("all_gather_into_tensor/concatenated", says=r"rank 0 is wrong")
class InterleavesRows(ForwardingGroup):
    """The output is interleaved row by row instead of block by block."""

    def all_gather_single(self, output: Any, tensor: Any, opts: Any) -> Any:
        work = super().all_gather_single(output, tensor, opts)
        work.wait()
        n = self.size()
        output.copy_(output.view(n, -1, *output.shape[1:]).transpose(0, 1).reshape(output.shape))
        return work


@breaks("all_gather/uneven", says=r"rank 0 is wrong\n\d of \d+ elements differ")
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


@breaks("all_gather/uneven", says=r"rank 0 is wrong\n1 of 450006 elements differ")
class CutsLargeTensorsOfOtherSizes(GroupMutant, ProcessGroupGloo):
    """Of a tensor of more than a MiB the last element is lost, if sizes differ."""

    base = "impl"

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        work = super().allgather(outputs, inputs, opts)
        if len({x.numel() for x in outputs[0]}) > 1:
            work.wait()
            for x in outputs[0]:
                if x.nbytes > 1 << 20:
                    x[-1, -1] = -1
        return work


@breaks("all_gather_into_tensor/stacked", says=r"raised RuntimeError: .* 3 dimensions and one of 2")
@breaks("reduce_scatter_tensor/stacked", says=r"raised RuntimeError: .* 3 dimensions and one of 2")
class RefusesStackedTensors(GroupMutant, ProcessGroupGloo):
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


@breaks("all_gather_into_tensor/both-names", says=r"rank 0 is wrong")
@breaks("reduce_scatter_tensor/both-names", says=r"rank 0 is wrong")
class OldNamesLeaveTheResultInACopy(Replacing):
    """By their old names, the operations leave the result in a copy."""

    @staticmethod
    def all_gather_into_tensor(right: Any, output: Any, *args: Any, **how: Any) -> Any:
        return right(output.clone(), *args, **how)

    @staticmethod
    def reduce_scatter_tensor(right: Any, output: Any, *args: Any, **how: Any) -> Any:
        return right(output.clone(), *args, **how)
