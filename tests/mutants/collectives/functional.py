"""Mutants of conformance/spec/collectives/functional.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional

from tests.mutants.kit import ForwardingGroup, Patch, breaks


class Functional(Patch):
    """Each static method of a mutant takes the place of the functional collective that has its
    name. Its first argument is the right one."""

    @classmethod
    @contextmanager
    def patched(cls) -> Iterator[None]:
        with ExitStack() as stack:
            for name, method in vars(cls).items():
                if isinstance(method, staticmethod):
                    wrong = partial(method.__func__, getattr(functional, name))
                    stack.enter_context(mock.patch.object(functional, name, wrong))
            yield


@breaks("functional/all_reduce", says=r"rank 0 is wrong[\s\S]*\[ws\d-max\]")
class FunctionalAllReduceAlwaysAdds(Functional):
    """The name of the reduction is ignored."""

    @staticmethod
    def all_reduce(right: Any, x: Any, op: str, *args: Any) -> Any:
        return right(x, "sum", *args)


@breaks("functional/unwaited-in-place", says=r"rank \d is wrong")
class OperatesOnACopyOfPendingResults(ForwardingGroup):
    """The pending result of a functional collective is cloned, and keeps its value."""

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        own = [tensor if type(tensor) is Tensor else tensor.clone() for tensor in tensors]
        return super().allreduce(own, opts)


@breaks("functional/compiled", says=r"OpaqueObject|Unsupported|Dynamo|rank \d is wrong")
class CannotBeCompiled(ForwardingGroup):
    """Python code that a compiler tries to trace, but cannot."""

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        return self.inner.broadcast(tensors, opts)


@breaks("functional/broadcast", says=r"rank 0 is wrong")
class FunctionalBroadcastComesFromRankZero(Functional):
    @staticmethod
    def broadcast(right: Any, x: Any, source: int, *args: Any) -> Any:
        return right(x, 0, *args)


@breaks("functional/all_gather_tensor", says=r"rank 0 is wrong[\s\S]*\[ws\d-1\]")
@breaks("functional/reduce_scatter_tensor", says=r"rank 0 is wrong[\s\S]*\[ws\d-1\]")
class IgnoresTheDimension(Functional):
    """The first dimension is used, whichever was passed."""

    @staticmethod
    def all_gather_tensor(right: Any, x: Any, dim: int, *args: Any) -> Any:
        return right(x, 0, *args)

    @staticmethod
    def reduce_scatter_tensor(right: Any, x: Any, op: str, dim: int, *args: Any) -> Any:
        return right(x, op, 0, *args)


@breaks("functional/all_to_all_single", says=r"is wrong")
class SwapsInputAndOutputSplits(Functional):
    """The input split sizes are used for the output, and the other way round."""

    @staticmethod
    def all_to_all_single(right: Any, x: Any, received: Any, sent: Any, *args: Any) -> Any:
        return right(x, sent, received, *args)


@breaks("functional/permute_tensor", says=r"rank 0 is wrong")
class PermutesBackwards(Functional):
    """The permutation is applied in the opposite direction."""

    @staticmethod
    def permute_tensor(right: Any, x: Any, to: Any, *args: Any) -> Any:
        return right(x, [to.index(rank) for rank in range(len(to))], *args)


@breaks("functional/input-untouched", says=r"rank \d is wrong\nat \[0\]")
class ReducesItsInput(Functional):
    """The input of an all_reduce holds the result as well."""

    @staticmethod
    def all_reduce(right: Any, x: Any, *args: Any) -> Any:
        result = functional.wait_tensor(right(x, *args))
        x.copy_(result)
        return result


@breaks("functional/waits-at-use", says=r"the result is no AsyncCollectiveTensor")
class FunctionalCollectivesBlock(Functional):
    """A functional collective returns only when it is complete."""

    @staticmethod
    def all_reduce(right: Any, *args: Any) -> Any:
        return functional.wait_tensor(right(*args))


@breaks("functional/subgroup", says=r"raised RuntimeError: no group of the name")
class FunctionalCollectivesUseTheDefaultGroup(Functional):
    """Functional collectives find no group but the default one."""

    @staticmethod
    def all_reduce(right: Any, x: Any, op: str, group: Any, *args: Any) -> Any:
        if group is not dist.group.WORLD:
            raise RuntimeError(f"no group of the name {group.group_name}")
        return right(x, op, group, *args)


@breaks("functional/permute_tensor", says=r"to \[0, 1, 2\]: rank 0 is wrong")
class PermuteTensorLosesFixedPoints(Functional):
    """A rank that sends to itself gets nothing."""

    base = "impl"

    @staticmethod
    def permute_tensor(right: Any, x: Tensor, to: list[int], *args: Any) -> Any:
        kept = to[dist.get_rank()] == dist.get_rank()
        return right(x.zero_() if kept else x, to, *args)
