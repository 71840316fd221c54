"""Mutants of conformance/spec/collectives/differentiation.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
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
        if isinstance(group, DeviceMesh):
            return torch.cat([x] * group.size(), dim)
        return right(x, dim, group, *args)


@breaks("functional/any-call", says=r"rank \d is wrong")
class FunctionalBroadcastRepeatsForAListOfRanks(Functional):
    """Where the group is given by its ranks, each rank keeps what it has."""

    base = "impl"

    @staticmethod
    def broadcast(right: Any, x: Tensor, src: int, group: Any, *args: Any) -> Any:
        return x.clone() if isinstance(group, list) else right(x, src, group, *args)


@breaks("functional/any-call", says=r"rank \d is wrong")
class FunctionalAllReduceIgnoresADimension(Functional):
    """Where the group is a dimension of a mesh, all ranks of the world take part."""

    base = "impl"

    @staticmethod
    def all_reduce(right: Any, x: Tensor, op: str, group: Any, *args: Any) -> Any:
        return x.clone() if isinstance(group, tuple) else right(x, op, group, *args)


@breaks("autograd/gradients-unchanged", says=r"nn.all_reduce: what has changed: rank 0 is wrong")
class AllReduceSumsTheGradientInPlace(Backward):
    base = "impl"
    function = nn._AllReduce

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        dist.all_reduce(gradient, group=ctx.group)
        return None, None, gradient


@breaks("autograd/gradients-unchanged", says=r"nn.reduce: what has changed: rank 0 is wrong")
class ReduceBroadcastsTheGradientInPlace(Backward):
    base = "impl"
    function = nn._Reduce

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        dist.broadcast(gradient, ctx.src, ctx.group)
        return None, None, None, gradient


_back_from_all_to_all: Any = nn._AlltoAll.backward


@breaks("autograd/gradients-unchanged", says=r"nn.all_to_all: what has changed: rank \d is wrong")
class AllToAllClearsGradients(Backward):
    """The memory of a gradient that was sent back is taken for free."""

    base = "impl"
    function = nn._AlltoAll

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        back = _back_from_all_to_all(ctx, *gradients)
        for one in gradients:
            one.zero_()
        return back


@breaks(
    "autograd/gradients-unchanged", says=r"reduce_scatter 0: what has changed: rank \d is wrong"
)
class FunctionalReduceScatterClearsItsInput(Functional):
    base = "impl"

    @staticmethod
    def reduce_scatter_tensor_autograd(right: Any, x: Tensor, *args: Any) -> Any:
        result = right(x, *args)
        functional.wait_tensor(result)
        x.detach().zero_()
        return result


@breaks("autograd/average", says=r"nn.all_reduce[\s\S]*inputs times theirs")
class AllReduceGradientOfAnAverageIsSummed(Backward):
    base = "impl"
    function = nn._AllReduce

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, None, nn._AllReduce.apply(dist.ReduceOp.SUM, ctx.group, gradient)


@breaks("autograd/average", says=r"reduce_scatter 0[\s\S]*inputs times theirs")
class FunctionalReduceScatterGradientOfAnAverageIsThatOfASum(Functional):
    base = "impl"

    @staticmethod
    def reduce_scatter_tensor_autograd(right: Any, x: Tensor, op: str, *args: Any) -> Any:
        total = right(x, "sum", *args)
        if op == "avg":
            return total - total.detach() * (1 - 1 / dist.get_world_size())
        return total


@breaks("autograd/average-in-parts", says=r"nn.reduce[\s\S]*inputs times theirs")
class ReduceGradientOfAnAverageIsThatOfASum(Backward):
    """As in torch 2.13."""

    base = "impl"
    function = nn._Reduce
    backward = staticmethod(nn._Reduce.backward)
