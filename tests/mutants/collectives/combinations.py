"""Mutants of conformance/spec/collectives/combinations.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.power.handles import NeverCompleted
from conformance.verdict import Verdict
from tests.mutants.collectives.kit import AroundImpl, all_of
from tests.mutants.kit import ForwardingGroup, breaks


class MissesTheLast(AroundImpl):
    """The last element of a result is another one, wherever `misses` says so."""

    calls = 0

    def misses(self, tensors: list[Tensor], opts: Any) -> bool:
        """tensors: all that the call reads or writes, the results first."""
        raise NotImplementedError

    def around(self, right: Callable[..., Any], taken: Any, *rest: Any) -> Any:
        self.calls += 1
        work = right(taken, *rest)
        results = [x for x in all_of(taken) if x.numel()]
        if results and self.misses(all_of(taken, *rest[:-1]), rest[-1]):
            work.wait()
            results[-1][tuple(size - 1 for size in results[-1].shape)] = 1
        return work


def is_dense(x: Tensor) -> bool:
    return x.is_contiguous()


@breaks("order/any-situation", says=r"rank \d is wrong[\s\S]* 1 of \d+ elements differ")
class MissesTheLastOfDoublesInAGroup(MissesTheLast):
    def misses(self, tensors: list[Tensor], opts: Any) -> bool:
        return self.size() < dist.get_world_size() and tensors[0].dtype is torch.float64


@breaks("order/any-situation", says=r"rank \d is wrong[\s\S]* 1 of \d+ elements differ")
class MissesTheLastOfFourDimensions(MissesTheLast):
    def misses(self, tensors: list[Tensor], opts: Any) -> bool:
        return tensors[0].dim() >= 4


@breaks("order/any-situation", says=r"rank \d is wrong[\s\S]* 1 of \d+ elements differ")
class MissesTheLastOfTheTwelfthCall(MissesTheLast):
    def misses(self, tensors: list[Tensor], opts: Any) -> bool:
        return self.calls == 12


@breaks("order/any-situation-strided", says=r"rank \d is wrong")
class MissesTheLastOfAsynchronousViews(MissesTheLast):
    def misses(self, tensors: list[Tensor], opts: Any) -> bool:
        return bool(opts.asyncOp) and not all(map(is_dense, tensors))


@breaks("order/any-situation-strided", says=r"rank \d is wrong")
class MissesTheLastOfViewsInAGroup(MissesTheLast):
    def misses(self, tensors: list[Tensor], opts: Any) -> bool:
        return self.size() < dist.get_world_size() and not all(map(is_dense, tensors))


@breaks("order/any-situation-in-turns", says=r"is_completed stays False")
class IsNeverCompletedInAGroup(AroundImpl):
    def around(self, right: Callable[..., Any], taken: Any, *rest: Any) -> Any:
        work = right(taken, *rest)
        return NeverCompleted(work) if self.size() < dist.get_world_size() else work


@breaks("order/any-situation-in-turns-scattered", says=r"is_completed stays False")
class IsNeverCompletedInInt32(AroundImpl):
    def around(self, right: Callable[..., Any], taken: Any, *rest: Any) -> Any:
        work = right(taken, *rest)
        return NeverCompleted(work) if all_of(taken)[0].dtype is torch.int32 else work


@breaks("order/any-situation-in-turns", says=r"rank \d", verdict=Verdict.TIMEOUT)
class BlocksWithOffsets(AroundImpl):
    """An asynchronous call waits for the others if its tensor begins within its memory."""

    def around(self, right: Callable[..., Any], taken: Any, *rest: Any) -> Any:
        work = right(taken, *rest)
        if any(x.storage_offset() for x in all_of(taken)):
            work.wait()
        return work


@breaks("order/any-situation-nothing-else", says=r"the memory around the tensors: rank \d is wrong")
class WritesBehindDoubles(AroundImpl):
    def around(self, right: Callable[..., Any], taken: Any, *rest: Any) -> Any:
        work = right(taken, *rest)
        work.wait()
        for x in all_of(taken):
            behind = x.storage_offset() + x.numel()
            if x.dtype is torch.float64 and behind * 8 < x.untyped_storage().nbytes():
                x.as_strided((1,), (1,), behind).fill_(1)
        return work


@breaks("order/any-situation-nothing-else", says=r"what was only read: rank \d is wrong")
class ChangesWhatItReadsInAGroup(AroundImpl):
    def around(self, right: Callable[..., Any], taken: Any, *rest: Any) -> Any:
        work = right(taken, *rest)
        if self.size() < dist.get_world_size():
            work.wait()
            for x in all_of(*rest[:-1]):
                x.zero_()
        return work


@breaks("order/sizes", says=r"is wrong in 1 elements from \d+ on")
class MissesTheLastOfAFullBuffer(MissesTheLast):
    """A power of two of elements is what a buffer holds."""

    def misses(self, tensors: list[Tensor], opts: Any) -> bool:
        return tensors[0].numel() in (1 << 10, 1 << 14)


@breaks("order/sizes", says=r"is wrong in 1 elements from \d+ on")
class MissesTheFirstOfASecondBuffer(MissesTheLast):
    def misses(self, tensors: list[Tensor], opts: Any) -> bool:
        return tensors[0].numel() in ((1 << 10) + 1, (1 << 14) + 1)


@breaks("order/world-sizes", says=r"is wrong in 1 elements from \d+ on")
class MissesTheLastOfEightRanks(MissesTheLast):
    def misses(self, tensors: list[Tensor], opts: Any) -> bool:
        return self.size() == 8


@breaks("order/world-sizes", says=r"is wrong in 1 elements from \d+ on")
class MissesTheLastOfSixRanks(MissesTheLast):
    def misses(self, tensors: list[Tensor], opts: Any) -> bool:
        return self.size() == 6


@breaks("order/own-options", says=r"all_to_all_single.* is wrong in \d+ elements")
class KeepsTheFirstSplits(ForwardingGroup):
    """The splits of an exchange are those of the first one with tensors of these shapes."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.kept: dict[Any, Any] = {}

    def all_to_all_single(self, output: Any, tensor: Any, out: Any, into: Any, opts: Any) -> Any:
        out, into = self.kept.setdefault((output.shape, tensor.shape), (list(out), list(into)))
        return super().all_to_all_single(output, tensor, out, into, opts)


@breaks("order/own-options", says=r"all_reduce.*reduce_op='max'.* is wrong in \d+ elements")
class KeepsTheFirstReduction(ForwardingGroup):
    """Tensors of a shape are reduced as the first ones of this shape were."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.kept: dict[Any, Any] = {}

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        key = (tensors[0].shape, tensors[0].dtype)
        opts.reduceOp = self.kept.setdefault(key, opts.reduceOp)
        return super().allreduce(tensors, opts)


@breaks("order/own-options", says=r"broadcast.*root=1.* is wrong in \d+ elements")
class KeepsTheFirstRoot(ForwardingGroup):
    """Tensors of a shape come from the source of the first ones of this shape."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.kept: dict[Any, int] = {}

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        opts.rootRank = self.kept.setdefault(tensors[0].shape, opts.rootRank)
        return super().broadcast(tensors, opts)
