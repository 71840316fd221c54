"""Mutants of conformance/spec/collectives/in_place.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from impl.gloo import ProcessGroupGloo
from tests.mutants.kit import ForwardingGroup, GroupMutant, breaks


def shares_memory(x: Tensor, others: list[Tensor]) -> bool:
    return any(x.data_ptr() == other.data_ptr() for other in others)


@breaks("gather/in-place", says=r"rank \d is wrong")
class GathersIntoAFreshList(ForwardingGroup):
    """The destination's list is cleared before its own input is read."""

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        if outputs and shares_memory(inputs[0], outputs[0]):
            inputs[0].zero_()
        return super().gather(outputs, inputs, opts)


@breaks("scatter/in-place", says=r"rank \d is wrong")
class ScattersIntoAFreshOutput(ForwardingGroup):
    """The source's output is cleared before the list is read."""

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        if inputs and shares_memory(outputs[0], inputs[0]):
            outputs[0].zero_()
        return super().scatter(outputs, inputs, opts)


@breaks("reduce_scatter/in-place", says=r"rank \d is wrong")
class SumsInTheOutput(ForwardingGroup):
    """The output is cleared, and then the inputs are added to it."""

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        if shares_memory(outputs[0], inputs[0]):
            outputs[0].zero_()
        return super().reduce_scatter(outputs, inputs, opts)


@breaks("reduce_scatter/into-another-input", says=r"rank \d is wrong")
class SparesItsOwnInputAlone(GroupMutant, ProcessGroupGloo):
    """The output is cleared, unless it is the rank's own input."""

    base = "impl"

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        mine = inputs[0][self.rank()]
        if shares_memory(outputs[0], [x for x in inputs[0] if x is not mine]):
            outputs[0].zero_()
        return super().reduce_scatter(outputs, inputs, opts)


@breaks("order/one-input-for-all", says=r"op=scatter[\s\S]*rank 0 is wrong")
class FindsRanksByAddress(ForwardingGroup):
    """Of a tensor that is the input for several ranks, only the last of them gets the values."""

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        kept = [
            [
                torch.zeros_like(x) if shares_memory(x, given[rank + 1 :]) else x
                for rank, x in enumerate(given)
            ]
            for given in inputs
        ]
        return super().scatter(outputs, kept, opts)


def _written_past(outputs: list[Tensor], work: Any) -> Any:
    """Also fill the element behind the last output, where that is of odd size, and there is one."""
    last = outputs[-1]
    end = last.storage_offset() + last.numel()
    if last.numel() % 2 and end < last.untyped_storage().nbytes() // last.element_size():
        work.wait()
        last.as_strided((1,), (1,), end).fill_(1)
    return work


@breaks("order/neighbours", says=r"op=all_gather[\s\S]*rank \d is wrong")
@breaks("all_gather/uneven", says=r"rank 0 is wrong\n1 of \d+ elements differ")
class GathersPairsOfElements(GroupMutant, ProcessGroupGloo):
    """Odd numbers of elements are rounded up behind the last output."""

    base = "impl"

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return _written_past(outputs[0], super().allgather(outputs, inputs, opts))


@breaks("order/neighbours", says=r"op=gather[\s\S]*rank \d is wrong")
class GathersPairsAtTheDestination(ForwardingGroup):
    """The destination rounds odd numbers of elements up behind the last output."""

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        work = super().gather(outputs, inputs, opts)
        return _written_past(outputs[0], work) if outputs else work
