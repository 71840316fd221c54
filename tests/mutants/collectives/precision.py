"""Mutants of conformance/spec/collectives/precision.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.mutants.collectives.functional import Functional
from tests.mutants.collectives.kit import lose, mapped, through_float32, through_half
from tests.mutants.collectives.reductions import reduces_by
from tests.mutants.kit import ForwardingGroup, breaks

Op = dist.ReduceOp


@breaks("reductions/rounding", says=r"'reduce_scatter', shape=\(262147,\), dtype='float32'")
class ReduceScattersManyInHalfPrecision(ForwardingGroup):
    """float32 goes through float16 on its way, if there is much of it."""

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        if outputs[0].numel() > 1 << 16:
            inputs = mapped(through_half, inputs)
        return super().reduce_scatter(outputs, inputs, opts)


@breaks("reductions/rounding", says=r"'all_reduce', shape=.*'float64', reduce_op='product'")
class MultipliesInSinglePrecision(ForwardingGroup):
    """A product of float64 is made in float32."""

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        if opts.reduceOp == Op.PRODUCT:
            lose(through_float32, tensors)
        return super().allreduce(tensors, opts)


@breaks("reductions/rounding", says=r"'all_reduce', shape=.*'float64', reduce_op='avg'")
class AveragesInSinglePrecision(ForwardingGroup):
    """An average of float64 is made in float32."""

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        if opts.reduceOp == Op.AVG:
            lose(through_float32, tensors)
        return super().allreduce(tensors, opts)


@breaks("reductions/rounding", says=r"'reduce', shape=.*'float32', reduce_op='sum'")
class ReducesInHalfPrecision(ForwardingGroup):
    """float32 goes through float16 on its way."""

    def reduce(self, tensors: Any, opts: Any) -> Any:
        if opts.reduceOp == Op.SUM:
            lose(through_half, tensors)
        return super().reduce(tensors, opts)


@breaks("reductions/rounding", says=r"'reduce_scatter', shape=.*'float64', reduce_op='sum'")
@breaks("reductions/min-max-bits", says=r"'reduce_scatter', shape=.*'float64', reduce_op='min'")
class ReduceScattersInSinglePrecision(ForwardingGroup):
    """float64 goes through float32 on its way."""

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        return super().reduce_scatter(outputs, mapped(through_float32, inputs), opts)


@breaks("reductions/rounding", says=r"'reduce_scatter_tensor', shape=.*'float16', reduce_op='sum'")
class ReduceScattersInBrainFloats(ForwardingGroup):
    """float16 goes through bfloat16 on its way."""

    def reduce_scatter_single(self, output: Any, tensor: Any, opts: Any) -> Any:
        if tensor.dtype is torch.float16:
            tensor = tensor.bfloat16().half()
        return super().reduce_scatter_single(output, tensor, opts)


@breaks("reductions/min-max-bits", says=r"'all_reduce', shape=.*'float64', reduce_op='max'")
class ComparesInSinglePrecision(ForwardingGroup):
    """The greatest float64 is looked for among numbers of float32."""

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        if opts.reduceOp == Op.MAX:
            lose(through_float32, tensors)
        return super().allreduce(tensors, opts)


@breaks("reductions/unbiased", says=r"bfloat16: sums are -0")
class CutsOffBrainFloats(ForwardingGroup):
    """A sum of bfloat16 is made in float32, whose lower half is then left out."""

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        if tensors[0].dtype is not torch.bfloat16:
            return super().allreduce(tensors, opts)
        wide = [x.float() for x in tensors]
        handle = super().allreduce(wide, opts)
        handle.wait()
        for x, w in zip(tensors, wide, strict=True):
            x.copy_((w.view(torch.int32) & -0x10000).view(torch.float32))
        return handle


@breaks("all_reduce_coalesced/precision", says=r"coalesced: .*'float32', reduce_op='min'")
class ComparesSeveralInHalfPrecision(ForwardingGroup):
    """Of several tensors of float32, the least numbers are looked for in float16."""

    def allreduce_coalesced(self, tensors: Any, opts: Any) -> Any:
        if reduces_by(opts, Op.MIN, Op.MAX):
            lose(through_half, tensors)
        return super().allreduce_coalesced(tensors, opts)


@breaks("coalescing/precision", says=r"managed: .*'reduce_scatter_tensor'.*'float64'")
@breaks("functional/precision", says=r"functionally: .*'reduce_scatter_tensor'.*'float64'")
class ScattersSeveralInSinglePrecision(ForwardingGroup):
    """Several tensors of float64 go through one buffer of float32."""

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        lossy = mapped(through_float32, inputs)
        return super().reduce_scatter_single_coalesced(outputs, lossy, opts)


@breaks("functional/precision", says=r"functionally: .*'all_reduce'.*'float32', reduce_op='sum'")
class FunctionsInHalfPrecision(Functional):
    """What the functional all_reduce sends is float16."""

    @staticmethod
    def all_reduce(right: Any, x: Any, *args: Any) -> Any:
        return right(through_half(x), *args)
