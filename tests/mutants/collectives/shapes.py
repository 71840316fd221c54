"""Mutants of conformance/spec/collectives/shapes.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tests.mutants.collectives.kit import AroundImpl, all_of, mapped
from tests.mutants.kit import ForwardingGroup, breaks


@breaks("all_gather/shapes", says=r"is wrong[\s\S]*Draw 1 \(call\)")
class AllGathersOneElementLess(ForwardingGroup):
    """The last element of tensors of more than eight is not sent."""

    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        work = super().allgather(outputs, inputs, opts)
        work.wait()
        for output in outputs[0]:
            if output.numel() > 8 and output.is_contiguous():
                output.view(-1)[-1] = output.view(-1)[0]
        return work


@breaks("all_gather_into_tensor/shapes", says=r"is wrong[\s\S]*Draw 1 \(call\)")
@breaks("all_reduce/shapes", says=r"is wrong[\s\S]*Draw 1 \(call\)")
@breaks("broadcast/shapes", says=r"is wrong[\s\S]*Draw 1 \(call\)")
@breaks("gather/shapes", says=r"is wrong[\s\S]*Draw 1 \(call\)")
@breaks("reduce/shapes", says=r"is wrong[\s\S]*Draw 1 \(call\)")
@breaks("reduce_scatter/shapes", says=r"is wrong[\s\S]*Draw 1 \(call\)")
@breaks("reduce_scatter_tensor/shapes", says=r"is wrong[\s\S]*Draw 1 \(call\)")
@breaks("scatter/shapes", says=r"is wrong[\s\S]*Draw 1 \(call\)")
class LeavesTheOddElementOut(AroundImpl):
    """Works on pairs: of an odd number of elements, the last one is left as it was."""

    def around(self, right: Callable[..., Any], taken: Any, *rest: Any) -> Any:
        is_odd = any(x.numel() % 2 for x in all_of(taken, *rest))
        before = mapped(Tensor.clone, all_of(taken))
        work = right(taken, *rest)
        work.wait()
        for x, old in zip(all_of(taken), before, strict=True):
            if is_odd and x.numel():
                last = (-1,) * x.dim()
                x[last] = old[last]
        return work


def _cut_off(x: Any, old: Any) -> None:
    if x.is_contiguous():
        x.view(-1)[16:] = old.view(-1)[16:]


@breaks("all_to_all/shapes", says=r"is wrong[\s\S]*Draw 1 \(call\)")
@breaks("all_to_all_single/shapes", says=r"is wrong[\s\S]*Draw 1 \(call\)")
class SlotsHoldSixteenElements(ForwardingGroup):
    """What one rank has for another is cut off after its sixteenth element."""

    def alltoall(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        before = [x.clone() for x in outputs]
        work = super().alltoall(outputs, inputs, opts)
        work.wait()
        for x, old in zip(outputs, before, strict=True):
            _cut_off(x, old)
        return work

    def all_to_all_single(self, output: Any, tensor: Any, out: Any, into: Any, opts: Any) -> Any:
        before = output.clone()
        work = super().all_to_all_single(output, tensor, out, into, opts)
        work.wait()
        rows = out or [len(output) // self.size()] * self.size()
        for x, old in zip(output.split(rows), before.split(rows), strict=True):
            _cut_off(x, old)
        return work
