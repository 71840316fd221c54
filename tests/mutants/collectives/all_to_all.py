"""Exchanges (all_to_all, all_to_all_single) that lose, misplace or overwrite what they carry."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from impl.gloo import ProcessGroupGloo
from tests.mutants.collectives.layouts import as_if_dense
from tests.mutants.kit import ForwardingGroup, GroupFault, breaks
from tests.mutants.handles import Done


@breaks("all_to_all/uneven", says=r"raised RuntimeError: .*tensors of one size")
class ExchangesOneSize(GroupFault, ProcessGroupGloo):
    """All tensors of an exchange are as large as the first."""

    base = "impl"

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        if any(x.shape != inputs[0].shape for x in (*inputs, *outputs)):
            raise RuntimeError("all_to_all takes tensors of one size")
        return super().alltoall(outputs, inputs, opts)


@breaks("all_to_all/empty", says=r"raised RuntimeError: nothing to exchange")
@breaks("all_to_all_single/empty", says=r"raised RuntimeError: nothing to exchange")
class ExchangesOnlySomething(ForwardingGroup):
    """A rank that has nothing to send is an error."""

    def alltoall(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        if all(x.numel() == 0 for x in inputs):
            raise RuntimeError("nothing to exchange")
        return super().alltoall(outputs, inputs, opts)

    def all_to_all_single(self, output: Any, tensor: Any, out: Any, into: Any, opts: Any) -> Any:
        if tensor.numel() == 0:
            raise RuntimeError("nothing to exchange")
        return super().all_to_all_single(output, tensor, out, into, opts)


@breaks("all_to_all_single/split-types", says=r"raised TypeError: split sizes are lists of int")
class TakesPlainSplitsAlone(ForwardingGroup):
    """Split sizes are Python's integers in a list."""

    def all_to_all_single(self, output: Any, tensor: Any, out: Any, into: Any, opts: Any) -> Any:
        for splits in (out, into):
            if type(splits) is not list or any(type(split) is not int for split in splits):
                raise TypeError("split sizes are lists of int")
        return super().all_to_all_single(output, tensor, out, into, opts)


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


def _cut_off(x: Any, old: Any) -> None:
    if x.is_contiguous():
        x.view(-1)[16:] = old.view(-1)[16:]


@breaks("all_to_all/strided", says=r"is wrong")
@breaks("all_to_all_single/strided", says=r"is wrong")
class ExchangesAsIfDense(GroupFault, ProcessGroupGloo):
    """The inputs' memory is sent in the order in which it lies."""

    base = "impl"

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return super().alltoall(outputs, [as_if_dense(x) for x in inputs], opts)

    def all_to_all_single(
        self, output: Any, tensor: Any, out: Any = (), into: Any = (), opts: Any = None
    ) -> Any:
        return super().all_to_all_single(output, as_if_dense(tensor), out, into, opts)


@breaks("all_to_all/only-outputs", says=r"what was only read: rank \d is wrong")
@breaks("all_to_all_single/only-outputs", says=r"what was only read: rank \d is wrong")
class ExchangesInPlace(ForwardingGroup):
    """What comes in lies in the inputs too."""

    def alltoall(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        work = super().alltoall(outputs, inputs, opts)
        work.wait()
        for output, tensor in zip(outputs, inputs, strict=True):
            tensor.copy_(output)
        return work

    def all_to_all_single(self, output: Any, tensor: Any, out: Any, into: Any, opts: Any) -> Any:
        work = super().all_to_all_single(output, tensor, out, into, opts)
        work.wait()
        rows = min(len(output), len(tensor))
        tensor[:rows] = output[:rows]
        return work


@breaks("all_to_all/async", says=r"rank \d is wrong")
@breaks("all_to_all_single/async", says=r"rank \d is wrong")
class NeverReallyExchanges(ForwardingGroup):
    """An asynchronous exchange is a handle and nothing more."""

    def alltoall(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        return Done() if opts.asyncOp else super().alltoall(outputs, inputs, opts)

    def all_to_all_single(self, output: Any, tensor: Any, out: Any, into: Any, opts: Any) -> Any:
        if opts.asyncOp:
            return Done()
        return super().all_to_all_single(output, tensor, out, into, opts)


@breaks("all_to_all/subgroup", says=r"is wrong")
@breaks("all_to_all_single/subgroup", says=r"is wrong")
class ExchangesByGlobalRanks(ForwardingGroup):
    """In a group, the block of a rank is looked for at its global rank."""

    def alltoall(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        k = self._too_far()
        return super().alltoall(outputs, [*inputs[k:], *inputs[:k]], opts)

    def all_to_all_single(self, output: Any, tensor: Any, out: Any, into: Any, opts: Any) -> Any:
        if not into:
            tensor = tensor.roll(-self._too_far() * (len(tensor) // self.size()), 0)
        return super().all_to_all_single(output, tensor, out, into, opts)

    def _too_far(self) -> int:
        return (dist.get_rank() - self.rank()) % self.size()


@breaks("all_to_all_single/one-sided-splits", says=r"raised RuntimeError: .* one side alone")
class SplitsComeInPairs(ForwardingGroup):
    """Split sizes are for both sides or for none."""

    def all_to_all_single(self, output: Any, tensor: Any, out: Any, into: Any, opts: Any) -> Any:
        if bool(out) != bool(into):
            raise RuntimeError("split sizes for one side alone")
        return super().all_to_all_single(output, tensor, out, into, opts)
