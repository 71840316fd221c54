"""Collectives and messages that misread inputs: those that are outputs too, those whose elements
share memory, those with a neg or conj bit, and the end of what is large."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp as Op

from impl.gloo import ProcessGroupGloo
from tests.mutants.collectives.kit import AroundImpl, all_of, mapped
from tests.mutants.kit import ForwardingGroup, GroupFault, breaks
from tests.mutants.replacing import Replacing


def inputs_mapped(f: Callable[[Tensor], Tensor], *rest: Any) -> list[Any]:
    """f of the tensors among these arguments of a collective; splits and options stay."""
    return [mapped(f, one) if all_of(one) else one for one in rest]


# ---- inputs that are outputs too


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
class SparesItsOwnInputAlone(GroupFault, ProcessGroupGloo):
    """The output is cleared, unless it is the rank's own input."""

    base = "impl"

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        mine = inputs[0][self.rank()]
        if shares_memory(outputs[0], [x for x in inputs[0] if x is not mine]):
            outputs[0].zero_()
        return super().reduce_scatter(outputs, inputs, opts)


# ---- inputs whose elements share memory


def zeros_if_expanded(x: Tensor) -> Tensor:
    shared = any(s == 0 and n > 1 for s, n in zip(x.stride(), x.shape, strict=True))
    return torch.zeros(x.shape, dtype=x.dtype) if shared else x


@breaks("all_gather/strided", says=r"of expanded tensors: rank 0 is wrong")
@breaks("scatter/strided", says=r"of expanded tensors: rank 0 is wrong")
@breaks("all_to_all_single/strided", says=r"of expanded tensors: rank 0 is wrong")
class ReadsZerosForExpandedTensors(AroundImpl):
    def around(self, right: Callable[..., Any], taken: Any, *rest: Any) -> Any:
        return right(taken, *inputs_mapped(zeros_if_expanded, *rest))


@breaks("p2p/non-contiguous", says=r"expanded at \[1\]: rank 1|expanded: rank 1")
class SendsZerosForExpandedTensors(GroupFault, ProcessGroupGloo):
    base = "impl"

    def send(self, tensors: Any, dst: int, tag: int) -> Any:
        return super().send([zeros_if_expanded(x) for x in tensors], dst, tag)


# ---- bits


def without_neg_bit(x: Tensor) -> Tensor:
    """The memory, as if it held the values."""
    return torch._neg_view(x) if x.is_neg() else x


def without_conj_bit(x: Tensor) -> Tensor:
    return x.conj() if x.is_conj() else x


class _BlindToInputs(AroundImpl):
    """What is only read is read as it lies in memory."""

    @staticmethod
    def bare(x: Tensor) -> Tensor:
        raise NotImplementedError

    def around(self, right: Callable[..., Any], taken: Any, *rest: Any) -> Any:
        return right(taken, *inputs_mapped(self.bare, *rest))


class _BlindToOutputs(_BlindToInputs):
    """What is written is written into memory as it is."""

    def around(self, right: Callable[..., Any], taken: Any, *rest: Any) -> Any:
        return right(mapped(self.bare, taken), *rest)


@breaks("negated/read", says=r"given with the bit: rank 0 is wrong")
@breaks("negated/scatter", says=r"given with the bit: rank 0 is wrong")
class ReadsBehindTheNegBit(_BlindToInputs):
    bare = staticmethod(without_neg_bit)


@breaks("negated/written", says=r"taken with the bit: rank 0 is wrong")
class WritesBehindTheNegBit(_BlindToOutputs):
    bare = staticmethod(without_neg_bit)


@breaks("conjugated/read", says=r"given with the bit: rank 0 is wrong")
@breaks("conjugated/gather", says=r"given with the bit: rank 0 is wrong")
class ReadsBehindTheConjBit(_BlindToInputs):
    bare = staticmethod(without_conj_bit)


@breaks("conjugated/reduced", says=r"taken with the bit: rank 0 is wrong")
class WritesBehindTheConjBit(_BlindToOutputs):
    bare = staticmethod(without_conj_bit)


@breaks("p2p/negated", says=r"neg.*: rank 1 is wrong")
class SendsBehindTheNegBit(GroupFault, ProcessGroupGloo):
    base = "impl"

    def send(self, tensors: Any, dst: int, tag: int) -> Any:
        return super().send([without_neg_bit(x) for x in tensors], dst, tag)


@breaks("conjugated/written", says=r"taken with the bit: rank 0 is wrong")
@breaks("p2p/conjugated", says=r"conj.*: rank 1 is wrong")
class ViewsConjugatesAsRealNumbers(Replacing):
    """torch's own functions refuse what these take as it lies in memory."""

    @staticmethod
    def all_gather(right: Any, tensors: list[Tensor], *args: Any, **how: Any) -> Any:
        return right([without_conj_bit(x) for x in tensors], *args, **how)

    @staticmethod
    def irecv(right: Any, tensor: Tensor, *args: Any, **how: Any) -> Any:
        return right(without_conj_bit(tensor), *args, **how)


# ---- the upper half of a range, and the end of what is large


@breaks("reductions/unsigned-order", says=r"(min|max).*: rank 0 is wrong")
class ComparesBytesAsSigned(ForwardingGroup):
    def allreduce(self, tensors: Any, opts: Any) -> Any:
        op = opts.reduceOp
        if (op == Op.MIN or op == Op.MAX) and tensors[0].dtype is torch.uint8:
            tensors = [tensors[0].view(torch.int8)]
        return super().allreduce(tensors, opts)


@breaks("p2p/larger-than-buffers", says=r"the message is wrong from element \[16777218\] on")
class LosesTheEndOfALargeMessage(ForwardingGroup):
    """What lies behind a buffer of 64 MiB is sent as zeros."""

    def send(self, tensors: Any, dst: int, tag: int) -> Any:
        if tensors[0].nbytes > 64 << 20:
            tensors = [tensors[0].clone()]
            tensors[0].view(-1)[-1:].zero_()
        return super().send(tensors, dst, tag)
