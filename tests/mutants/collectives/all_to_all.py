"""Mutants of conformance/spec/collectives/all_to_all.py."""

from __future__ import annotations

from typing import Any

from conformance.power.handles import Done
from impl.gloo import ProcessGroupGloo
from tests.mutants.kit import ForwardingGroup, GroupMutant, breaks


@breaks("all_to_all/values", says=r"rank 0 is wrong")
@breaks("all_to_all_single/even", says=r"rank 0 is wrong")
class AllToAllReturnsTheInput(ForwardingGroup):
    """Every rank gets back its own input."""

    def alltoall(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        for output, tensor in zip(outputs, inputs, strict=True):
            output.copy_(tensor)
        return Done()

    def all_to_all_single(self, output: Any, tensor: Any, out: Any, into: Any, opts: Any) -> Any:
        output.copy_(tensor)
        return Done()


@breaks("all_to_all_single/uneven", says=r"table=\[\[1, 3, 2\][\s\S]*is wrong")
class SplitsTheInputByOutputSizes(ForwardingGroup):
    """The offset of a block is computed from the output split sizes instead of the input split
    sizes."""

    def all_to_all_single(self, output: Any, tensor: Any, out: Any, into: Any, opts: Any) -> Any:
        if out and into and sum(out) == sum(into):
            starts = [sum(out[:rank]) for rank in range(self.size())]
            rows = [
                (start + i) % len(tensor)
                for start, count in zip(starts, into, strict=True)
                for i in range(count)
            ]
            tensor = tensor[rows]
        return super().all_to_all_single(output, tensor, out, into, opts)


@breaks("all_to_all/uneven", says=r"raised RuntimeError: .*tensors of one size")
class ExchangesOneSize(GroupMutant, ProcessGroupGloo):
    """All tensors of an exchange are as large as the first."""

    base = "impl"

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        if any(x.shape != inputs[0].shape for x in (*inputs, *outputs)):
            raise RuntimeError("all_to_all takes tensors of one size")
        return super().alltoall(outputs, inputs, opts)


@breaks("all_to_all_single/split-types", says=r"raised TypeError: split sizes are lists of int")
class TakesOnlyListsOfIntsAsSplits(ForwardingGroup):
    """Split sizes other than a list of Python integers are refused."""

    def all_to_all_single(self, output: Any, tensor: Any, out: Any, into: Any, opts: Any) -> Any:
        for splits in (out, into):
            if type(splits) is not list or any(type(split) is not int for split in splits):
                raise TypeError("split sizes are lists of int")
        return super().all_to_all_single(output, tensor, out, into, opts)


@breaks("all_to_all_single/one-sided-splits", says=r"raised RuntimeError: .* one side alone")
class RefusesOneSidedSplits(ForwardingGroup):
    """Split sizes must be given for both sides or for neither."""

    def all_to_all_single(self, output: Any, tensor: Any, out: Any, into: Any, opts: Any) -> Any:
        if bool(out) != bool(into):
            raise RuntimeError("split sizes for one side alone")
        return super().all_to_all_single(output, tensor, out, into, opts)


@breaks("all_to_all/uneven", says=r"splits=[\s\S]*is wrong\nat \[0\]: 1 of \d+ elements differ")
class CutsLargeTensorsThatDiffer(GroupMutant, ProcessGroupGloo):
    """The last element of a large tensor of an exchange is lost, if sizes differ."""

    base = "impl"

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        work = super().alltoall(outputs, inputs, opts)
        if len({x.numel() for x in outputs}) > 1:
            work.wait()
            for x in outputs:
                if x.nbytes > 1 << 20:
                    x[-1] = -1
        return work
