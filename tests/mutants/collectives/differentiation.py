"""Mutants of conformance/spec/collectives/differentiation.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.nn import functional as nn

from tests.mutants.collectives.functional import Functional
from tests.mutants.collectives.gradients import Backward
from tests.mutants.collectives.layouts import as_if_dense
from tests.mutants.kit import breaks


@breaks("autograd/groups", says=r"inputs times theirs")
class AllReduceGradientInAGroupIsNotSummed(Backward):
    """Backward of an all_reduce adds up in the default group alone."""

    base = "impl"
    function = nn._AllReduce

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        total = gradient.clone()
        if dist.get_world_size(ctx.group) < dist.get_world_size():
            return None, None, total
        dist.all_reduce(total)
        return None, None, total


_back_from_all_gather: Any = nn._AllGather.backward
_back_from_all_reduce: Any = nn._AllReduce.backward


@breaks("autograd/lists-in-groups", says=r"inputs times theirs")
class AllGatherGradientInAGroupIsReversed(Backward):
    """In a group of some ranks, backward of an all_gather takes parts in reverse order."""

    base = "impl"
    function = nn._AllGather

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if dist.get_world_size(ctx.group) < dist.get_world_size():
            gradients = gradients[::-1]
        return _back_from_all_gather(ctx, *gradients)


@breaks("autograd/roots-in-groups", says=r"inputs times theirs")
class BroadcastComparesAGlobalWithAGroupRank(Backward):
    """The source's gradient is zeroed where its rank in the group is another than its global
    one, as in torch 2.13."""

    base = "impl"
    function = nn._Broadcast

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        total = nn._Reduce.apply(ctx.src, dist.ReduceOp.SUM, ctx.group, gradient)
        if ctx.src != dist.get_rank(ctx.group):
            total.zero_()
        return None, None, total


@breaks("autograd/layouts", says=r"inputs times theirs")
class AllReduceTakesGradientsForDense(Backward):
    """The memory of a gradient is reduced, in the order in which it lies."""

    base = "impl"
    function = nn._AllReduce

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _back_from_all_reduce(ctx, as_if_dense(gradient))


@breaks("autograd/layouts-of-lists", says=r"inputs times theirs")
class AllGatherTakesGradientsForDense(Backward):
    """The memory of each gradient is sent, in the order in which it lies."""

    base = "impl"
    function = nn._AllGather

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _back_from_all_gather(ctx, *map(as_if_dense, gradients))


@breaks("functional/any-call", says=r"op='all_reduce'[\s\S]*rank \d is wrong")
class FunctionalAllReduceTakesViewsForDense(Functional):
    """The memory of the input is reduced, in the order in which it lies."""

    base = "impl"

    @staticmethod
    def all_reduce(right: Any, x: Tensor, *args: Any) -> Any:
        return right(as_if_dense(x), *args)


@breaks("functional/any-call", says=r"reduce_op='(?!sum)\w+'[\s\S]*rank \d is wrong")
class FunctionalReduceScatterAlwaysAdds(Functional):
    """The name of the reduction is ignored."""

    base = "impl"

    @staticmethod
    def reduce_scatter_tensor(right: Any, x: Tensor, op: str, *args: Any) -> Any:
        return right(x, "sum", *args)


@breaks("functional/any-call", says=r"rank \d is wrong")
class FunctionalGatherRepeatsForAMesh(Functional):
    """Where the group is given as a mesh, a rank gathers from itself alone."""

    base = "impl"

    @staticmethod
    def all_gather_tensor(right: Any, x: Tensor, dim: int, group: Any, *args: Any) -> Any:
        if not isinstance(group, dist.ProcessGroup | str):
            return torch.cat([x] * group.size(), dim)
        return right(x, dim, group, *args)
