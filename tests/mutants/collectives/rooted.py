"""Mutants of conformance/spec/collectives/rooted.py."""

from __future__ import annotations

from typing import Any

import torch

from impl.gloo import ProcessGroupGloo
from tests.mutants.kit import ForwardingGroup, GroupMutant, breaks
from tests.mutants.replacing import Replacing


@breaks("broadcast/values", says=r"rank 0 is wrong\nat \[0\]")
class BroadcastsFromTheNextRank(ForwardingGroup):
    """The source is one rank too far."""

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        opts.rootRank = (opts.rootRank + 1) % self.size()
        return super().broadcast(tensors, opts)


@breaks("broadcast/same-numel", says=r"raised RuntimeError: .*shape")
class BroadcastTakesOnlyMatrices(ForwardingGroup):
    """Tensors that are not matrices are refused."""

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        if tensors[0].dim() != 2:
            raise RuntimeError(f"broadcast of shape {tuple(tensors[0].shape)}")
        return super().broadcast(tensors, opts)


@breaks("reduce/sum", says=r"rank 1 is wrong")
class ReducesToRankZero(ForwardingGroup):
    """Whatever the destination is."""

    def reduce(self, tensors: Any, opts: Any) -> Any:
        opts.rootRank = 0
        return super().reduce(tensors, opts)


@breaks("gather/values", says=r"is wrong\nat \[\d\]\[\d\]")
class GathersInReverse(ForwardingGroup):
    """The last rank's tensor comes first."""

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        return super().gather([list(reversed(one)) for one in outputs], inputs, opts)


@breaks("scatter/values", says=r"is wrong\nat \[\d\]")
class ScattersTheNextRanksPart(ForwardingGroup):
    """Rank r gets what is for rank r + 1."""

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        return super().scatter(outputs, [[*one[1:], one[0]] for one in inputs], opts)


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
class GathersRealParts(GroupMutant, ProcessGroupGloo):
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


@breaks("reduce/other-ranks-untouched", says=r"rank \d is wrong")
class LeavesPartialSums(GroupMutant, ProcessGroupGloo):
    """The last element of the other ranks' tensors holds a partial sum."""

    base = "impl"

    def reduce(self, tensors: Any, opts: Any = None) -> Any:
        work = super().reduce(tensors, opts)
        work.wait()
        if self.rank() != opts.rootRank:
            tensors[0].view(-1)[-1:] += 1
        return work


@breaks("reduce/other-ranks-untouched", says=r"large_reduced_on_each[\s\S]*rank \d is wrong")
class LeavesPartialSumsOfPieces(GroupMutant, ProcessGroupGloo):
    """What travels in pieces is added up where it passes."""

    base = "impl"

    def reduce(self, tensors: Any, opts: Any = None) -> Any:
        work = super().reduce(tensors, opts)
        work.wait()
        if self.rank() != opts.rootRank and tensors[0].numel() > 1 << 16:
            tensors[0].add_(1)
        return work


@breaks("reduce/other-ranks-untouched", says=r"reduce[\s\S]*rank \d is wrong")
class LeavesPartialSumsOfIntegers(GroupMutant, ProcessGroupGloo):
    """Integers are added up where they pass."""

    base = "impl"

    def reduce(self, tensors: Any, opts: Any = None) -> Any:
        work = super().reduce(tensors, opts)
        work.wait()
        if self.rank() != opts.rootRank and tensors[0].dtype is torch.int64:
            tensors[0].add_(1)
        return work


@breaks("gather/list-at-destination-only", says=r"raised ValueError: every rank needs a list")
class GatherNeedsListsEverywhere(Replacing):
    @staticmethod
    def gather(right: Any, tensor: Any, gather_list: Any = None, *args: Any, **how: Any) -> Any:
        if gather_list is None:
            raise ValueError("every rank needs a list")
        return right(tensor, gather_list, *args, **how)
