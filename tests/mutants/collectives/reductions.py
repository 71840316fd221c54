"""Mutants of conformance/spec/collectives/reductions.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from conformance.target import Target
from impl.gloo import ProcessGroupGloo
from tests.mutants.kit import ForwardingGroup, GroupMutant, breaks

Op = dist.ReduceOp


@breaks("reductions/integers-are-exact", says=r"rank \d is wrong")
class AddsSeveralIntegersAsFloats(ForwardingGroup):
    """Several tensors of int64 go through float64."""

    def allreduce_coalesced(self, tensors: Any, opts: Any) -> Any:
        if tensors[0].dtype is not torch.int64:
            return super().allreduce_coalesced(tensors, opts)
        wide = [x.to(torch.float64) for x in tensors]
        work = super().allreduce_coalesced(wide, opts)
        work.wait()
        for x, result in zip(tensors, wide, strict=True):
            x.copy_(result)
        return work


@breaks("reductions/unsigned-order", says=r"(min|max).*: rank 0 is wrong")
class ComparesBytesAsSigned(ForwardingGroup):
    def allreduce(self, tensors: Any, opts: Any) -> Any:
        op = opts.reduceOp
        if (op == Op.MIN or op == Op.MAX) and tensors[0].dtype is torch.uint8:
            tensors = [tensors[0].view(torch.int8)]
        return super().allreduce(tensors, opts)


@breaks("reductions/min", says=r"reduce_op='min'[\s\S]*rank 0 is wrong")
class MinOfAReduceScatterIsMax(ForwardingGroup):
    """The table of one collective has the same entry twice."""

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        if opts.reduceOp == Op.MIN:
            opts.reduceOp = Op.MAX
        return super().reduce_scatter(outputs, inputs, opts)


@breaks("reductions/bor", says=r"reduce_op='bor'[\s\S]*rank 0 is wrong")
class BorIsExclusive(ForwardingGroup):
    """OR is exclusive."""

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        if opts.reduceOp == Op.BOR:
            opts.reduceOp = Op.BXOR
        return super().allreduce(tensors, opts)


@breaks("reductions/bxor", says=r"reduce_op='bxor'[\s\S]*rank 0 is wrong")
class BxorIsNotExclusive(ForwardingGroup):
    """Exclusive OR is not."""

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        if opts.reduceOp == Op.BXOR:
            opts.reduceOp = Op.BOR
        return super().allreduce(tensors, opts)


@breaks("reductions/premul-sum", says=r"got 3.0, want 1.5")
class IgnoresTheFactor(ForwardingGroup):
    """PREMUL_SUM is claimed, and is SUM."""

    @classmethod
    def target(cls) -> Target:
        plain = super().target()
        ops = plain.capabilities.reduce_ops | {"premul_sum"}
        return replace(plain, capabilities=replace(plain.capabilities, reduce_ops=ops))

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        if opts.reduceOp == Op.PREMUL_SUM:
            opts.reduceOp = Op.SUM
        return super().allreduce(tensors, opts)


def reduces_by(opts: Any, *ops: Any) -> bool:
    """Not by `in`: a member of torch's enumeration is unequal to a ReduceOp of the same kind,
    and equal to it only from the other side (torch 2.13)."""
    return any(opts.reduceOp == op for op in ops)


@breaks("reductions/band", says=r"reduce_op='band'[\s\S]*rank 0 is wrong")
class BitwiseOperationsAdd(ForwardingGroup):
    """The bitwise operations run as SUM."""

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        if reduces_by(opts, Op.BAND, Op.BOR, Op.BXOR):
            opts.reduceOp = Op.SUM
        return super().allreduce(tensors, opts)


@breaks("reductions/max", says=r"reduce_op='max'[\s\S]*rank 0 is wrong")
class MaxIsOfAbsoluteValues(ForwardingGroup):
    """MAX compares absolute values."""

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        if opts.reduceOp == Op.MAX:
            tensors[0].abs_()
        return super().allreduce(tensors, opts)


@breaks("reductions/product", says=r"reduce_op='product'[\s\S]*is wrong")
class MultipliesItselfTwice(ForwardingGroup):
    """Rank 0's factor counts twice."""

    def reduce(self, tensors: Any, opts: Any) -> Any:
        if opts.reduceOp == Op.PRODUCT and self.rank() == 0:
            tensors[0].mul_(tensors[0].clone())
        return super().reduce(tensors, opts)


@breaks("reductions/product", says=r"reduce_op='product'[\s\S]*is wrong[\s\S]*\[ws5-product")
@breaks("reductions/max", says=r"reduce_op='max'[\s\S]*is wrong[\s\S]*\[ws5-max")
@breaks("reductions/bxor", says=r"reduce_op='bxor'[\s\S]*is wrong[\s\S]*\[ws5-bxor")
class ReducesFourRanksAtMost(ForwardingGroup):
    """Of five ranks and more, the first four count in a PRODUCT, MAX and BXOR."""

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        if self.rank() >= 4:
            for x in tensors:
                info = torch.finfo(x.dtype) if x.is_floating_point() else torch.iinfo(x.dtype)
                for op, neutral in ((Op.PRODUCT, 1), (Op.BXOR, 0), (Op.MAX, info.min)):
                    if opts.reduceOp == op:
                        x.fill_(neutral)
        return super().allreduce(tensors, opts)


@breaks("reductions/integers-wrap", says=r"got 255, want 44")
class IntegersSaturate(ForwardingGroup):
    """Integer sums stop at the greatest value."""

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        [x] = tensors
        if x.dtype not in (torch.uint8, torch.int8):
            return super().allreduce(tensors, opts)
        wide = x.to(torch.int64)
        work = super().allreduce([wide], opts)
        work.wait()
        info = torch.iinfo(x.dtype)
        x.copy_(wide.clamp(info.min, info.max))
        return work


@breaks("reductions/integers-wrap", says=r"got 65535, want \d+")
class SaturatesUnsignedShorts(GroupMutant, ProcessGroupGloo):
    """Sums of uint16 stop at the greatest value."""

    base = "impl"

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        [x] = tensors
        if x.dtype is not torch.uint16:
            return super().allreduce(tensors, opts)
        wide = x.to(torch.int64)
        work = super().allreduce([wide], opts)
        work.wait()
        x.copy_(wide.clamp(max=torch.iinfo(x.dtype).max))
        return work


@breaks("reductions/integers-are-exact", says=r"rank \d is wrong")
class AddsIntegersAsFloats(ForwardingGroup):
    """int64 goes through float64."""

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        [x] = tensors
        if x.dtype is not torch.int64:
            return super().allreduce(tensors, opts)
        wide = x.to(torch.float64)
        work = super().allreduce([wide], opts)
        work.wait()
        x.copy_(wide)
        return work


@breaks("reductions/infinities", says=r"got [\d.e+]+, want inf")
class ClampsInfinities(ForwardingGroup):
    """Infinities become the greatest number there is."""

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        work = super().allreduce(tensors, opts)
        work.wait()
        info = torch.finfo(tensors[0].dtype)
        tensors[0].clamp_(info.min, info.max)
        return work


@breaks("reductions/subnormals", says=r"sum: rank 0 is wrong[\s\S]*got -?0.0")
class FlushesToZero(ForwardingGroup):
    """What is less than the least normal number is zero."""

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        for x in tensors:
            x[x.abs() < torch.finfo(x.dtype).smallest_normal] = 0
        return super().allreduce(tensors, opts)


@breaks("reductions/nan-in-min-max", says=r"(min|max): rank 0 is wrong[\s\S]*want nan")
class SkipsNaN(GroupMutant, ProcessGroupGloo):
    """MIN and MAX take NaN for an infinity that never wins."""

    base = "impl"

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        if opts is not None and reduces_by(opts, Op.MIN, Op.MAX):
            never = float("inf") if opts.reduceOp == Op.MIN else -float("inf")
            tensors[0].nan_to_num_(nan=never)
        return super().allreduce(tensors, opts)


@breaks("reductions/bool", says=r"sum: rank 0 is wrong")
class AddsBoolsModuloTwo(ForwardingGroup):
    """True and true is false."""

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        if tensors[0].dtype is torch.bool and opts.reduceOp == Op.SUM:
            opts.reduceOp = Op.BXOR
        return super().allreduce(tensors, opts)


@breaks("reductions/bool-bytes", says=r"sum: rank 0 is wrong[\s\S]*got [23], want 1")
class LeavesTwosInBools(GroupMutant, ProcessGroupGloo):
    """A sum of bools is a sum of their bytes."""

    base = "impl"

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        [x] = tensors
        as_bytes = x.view(torch.uint8) if x.dtype is torch.bool else x
        return super().allreduce([as_bytes], opts)


@breaks("reductions/average", says=r"reduce_op='avg'[\s\S]*is wrong")
class AveragesOverElements(ForwardingGroup):
    """Divides by the number of elements."""

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        by_elements = opts.reduceOp == Op.AVG
        work = super().allreduce(tensors, opts)
        work.wait()
        if by_elements:
            tensors[0].mul_(self.size() / max(1, tensors[0].numel()))
        return work


@breaks("reductions/average", says=r"op='reduce_scatter_tensor'[\s\S]*is wrong")
class ReduceScatterDoesNotDivide(ForwardingGroup):
    """AVG of a reduce_scatter returns the sum."""

    def reduce_scatter_single(self, output: Any, tensor: Any, opts: Any) -> Any:
        if opts.reduceOp == Op.AVG:
            opts.reduceOp = Op.SUM
        return super().reduce_scatter_single(output, tensor, opts)


@breaks("reductions/average", says=r"op='reduce'[\s\S]*test_average_divides_by_the_ranks")
class ReduceDividesByTheWorld(ForwardingGroup):
    """AVG of a reduce divides by the ranks that there are, whichever group they are in."""

    def reduce(self, tensors: Any, opts: Any) -> Any:
        is_average = opts.reduceOp == Op.AVG
        work = super().reduce(tensors, opts)
        work.wait()
        if is_average:
            tensors[0].mul_(self.size() / dist.get_world_size())
        return work


@breaks("reductions/average-of-integers", says=r"got 0, want \d")
class AveragesByMultiplying(GroupMutant, ProcessGroupGloo):
    """Integers are multiplied by 1/n, which is 0."""

    base = "impl"

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        work = super().allreduce(tensors, opts)
        work.wait()
        if opts is not None and opts.reduceOp == Op.AVG and not tensors[0].is_floating_point():
            tensors[0].zero_()
        return work


@breaks("reductions/average-of-integers", says=r"avg: rank 0 is wrong[\s\S]*got -\d+, want -\d+")
class RoundsAveragesDown(GroupMutant, ProcessGroupGloo):
    """The quotient of a sum below zero is the next integer below."""

    base = "impl"

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        if opts is None or opts.reduceOp != Op.AVG or tensors[0].is_floating_point():
            return super().allreduce(tensors, opts)
        opts.reduceOp = Op.SUM
        wide = [x.to(torch.int64) for x in tensors]
        work = super().allreduce(wide, opts)
        work.wait()
        for x, total in zip(tensors, wide, strict=True):
            x.copy_(total.div(self.size(), rounding_mode="floor"))
        return work


@breaks("reductions/average-in-range", says=r"got inf, want 60000.0")
class AddsBeforeItDivides(GroupMutant, ProcessGroupGloo):
    """The sum of an average is made in float16."""

    base = "impl"

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        if opts is None or opts.reduceOp != Op.AVG:
            return super().allreduce(tensors, opts)
        opts.reduceOp = Op.SUM
        work = super().allreduce(tensors, opts)
        work.wait()
        tensors[0].div_(self.size())
        return work
