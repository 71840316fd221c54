"""Mutants of conformance/spec/collectives/gradients.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives
from torch.distributed import _functional_collectives as functional
from torch.distributed.nn import functional as nn
from torch.distributed.nn import functional as nn_functional

from tests.mutants.collectives.functional import Functional
from tests.mutants.kit import Patch, breaks


class Backward(Patch):
    """`backward` takes the place of that of one of torch.distributed.nn's functions."""

    function: ClassVar[type[Any]]
    backward: ClassVar[Callable[..., Any]]

    @classmethod
    @contextmanager
    def patched(cls) -> Iterator[None]:
        with mock.patch.object(cls.function, "backward", staticmethod(cls.backward)):
            yield


@breaks("autograd/all_reduce", says=r"rank 0 is wrong")
class AllReduceGradientIsNotSummed(Backward):
    """Only this rank's gradient for the sum counts."""

    function = nn._AllReduce

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, None, gradient


@breaks("autograd/reduce_scatter", says=r"rank \d is wrong")
class ReduceScatterGradientRepeatsOnePart(Backward):
    """Every part's gradient is that of this rank's part."""

    function = nn._Reduce_Scatter

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, None, None, *[gradient] * dist.get_world_size(ctx.group)


@breaks("autograd/broadcast", says=r"rank \d is wrong")
class BroadcastGradientIsNotSummed(Backward):
    """Only the source's own gradient counts."""

    function = nn._Broadcast

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, None, gradient if ctx.src == ctx.rank else torch.zeros_like(gradient)


@breaks("autograd/reduce", says=r"rank 0 is wrong")
class ReduceGradientIsEachRanksOwn(Backward):
    """Every rank's own gradient counts, although only the destination has the sum."""

    function = nn._Reduce

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, None, None, gradient


@breaks("autograd/gather", says=r"rank 0 is wrong")
class GatherGradientIsEachRanksOwn(Backward):
    """Every rank's own gradient for its part counts."""

    function = nn._Gather

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None, gradients[dist.get_rank(ctx.group)]


@breaks("autograd/scatter", says=r"rank \d is wrong")
class ScatterGradientRepeatsTheSourcesPart(Backward):
    """The source takes its own part's gradient for that of all parts."""

    function = nn._Scatter

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        own = gradient if dist.get_rank(ctx.group) == ctx.src else torch.zeros_like(gradient)
        return None, None, *[own] * dist.get_world_size(ctx.group)


@breaks("autograd/all_to_all", says=r"rank \d is wrong")
class AllToAllGradientIsNotSentBack(Backward):
    """Gradients are not sent back to where the parts came from."""

    function = nn._AlltoAll

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None, *gradients


_exchanged_back: Any = nn._AlltoAllSingle.backward


@breaks("autograd/all_to_all_single", says=r"to \[1, 2, 0\]: rank 0 is wrong")
class AllToAllSingleGradientDoesNotExchangeSplits(Backward):
    """Backward uses the split sizes of forward without exchanging them."""

    function = nn._AlltoAllSingle

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        sizes = ctx.output_split_sizes, ctx.input_split_sizes
        ctx.input_split_sizes, ctx.output_split_sizes = sizes
        return _exchanged_back(ctx, gradient)


class _Wrongly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Any, back: Any) -> Any:
        ctx.back = back
        return functional.wait_tensor(call(x))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.back(*gradients), None, None


def with_gradient(
    call: Callable[[Tensor], Tensor], x: Tensor, back: Callable[[Tensor], Tensor]
) -> Any:
    """call(x), whose gradient is what `back` makes of that of the result."""
    return _Wrongly.apply(x, call, back)  # type: ignore[no-untyped-call]  # torch's


@breaks("functional/all_reduce-gradient", says=r"rank 0 is wrong")
class FunctionalAllReduceGradientIsNotSummed(Functional):
    """Only this rank's gradient for the sum counts."""

    @staticmethod
    def all_reduce(right: Any, x: Tensor, *args: Any) -> Any:
        return with_gradient(lambda y: right(y, *args), x, lambda gradient: gradient)


@breaks("functional/all_gather-gradient", says=r"rank 0 is wrong")
class FunctionalAllGatherGradientIsNotSummed(Functional):
    """Only this rank's gradient for its part counts."""

    @staticmethod
    def all_gather_tensor_autograd(right: Any, x: Tensor, dim: int, group: Any) -> Any:
        def own(gradient: Tensor) -> Tensor:
            return gradient.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)]

        return with_gradient(lambda y: right(y, dim, group), x, own)


@breaks("functional/reduce_scatter-gradient", says=r"rank \d is wrong")
class FunctionalReduceScatterGradientRepeatsOnePart(Functional):
    """Every part's gradient is that of this rank's part."""

    @staticmethod
    def reduce_scatter_tensor_autograd(right: Any, x: Tensor, op: str, dim: int, group: Any) -> Any:
        def repeated(gradient: Tensor) -> Tensor:
            return torch.cat([gradient] * dist.get_world_size(group), dim)

        return with_gradient(lambda y: right(y, op, dim, group), x, repeated)


@breaks("functional/all_to_all-gradient", says=r"rank \d is wrong")
class FunctionalAllToAllGradientIsReversed(Functional):
    """The rows of the gradient that come back are in reverse order."""

    @staticmethod
    def all_to_all_single_autograd(
        right: Any, x: Tensor, received: Any, sent: Any, group: Any
    ) -> Any:
        def back(gradient: Tensor) -> Tensor:
            returned = right(gradient.contiguous(), sent, received, group)
            return functional.wait_tensor(returned).flip(0)  # type: ignore[no-any-return]

        return with_gradient(lambda y: right(y, received, sent, group), x, back)


@breaks("autograd/all_gather", says=r"rank 0 is wrong")
class AllGatherGradientIsNotSummed(Patch):
    """Backward of an all_gather takes this rank's own gradient for that of all."""

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        def own(ctx: Any, *gradients: Any) -> Any:
            return None, gradients[dist.get_rank(ctx.group)]

        with mock.patch.object(nn_functional._AllGather, "backward", staticmethod(own)):
            yield


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError("no gradient")


@breaks("functional/avg-gradient", says=r"was refused with 'no gradient'")
class AverageGradientRaises(Patch):
    """Backward of a nn_functional average raises, and does not say what is not supported."""

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        right = _functional_collectives.all_reduce

        def all_reduce(x: Any, op: str, *args: Any, **how: Any) -> Any:
            result = right(x, op, *args, **how)
            return _NoGradient.apply(result) if op == "avg" else result  # type: ignore[no-untyped-call]  # torch's

        with mock.patch.object(_functional_collectives, "all_reduce", all_reduce):
            yield


class _SumOfGradients(torch.autograd.Function):
    """A mean over the ranks, whose backward adds up and does not divide."""

    @staticmethod
    def forward(ctx: Any, _x: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        return mean.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        total = gradients[0].clone()
        dist.all_reduce(total)
        return total, None


@breaks("functional/avg-gradient", says=r"rank 0 is wrong")
@breaks("functional/avg-gradient-works", says=r"rank 0 is wrong")
class AverageHasTheGradientOfASum(Patch):
    """The gradient of a nn_functional average is the sum of all ranks' gradients."""

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        right = _functional_collectives.all_reduce

        def all_reduce(x: Any, op: str, *args: Any, **how: Any) -> Any:
            if op != "avg":
                return right(x, op, *args, **how)
            mean = _functional_collectives.wait_tensor(right(x.detach(), op, *args, **how))
            return _SumOfGradients.apply(x, mean)  # type: ignore[no-untyped-call]  # torch's

        with mock.patch.object(_functional_collectives, "all_reduce", all_reduce):
            yield


@breaks("autograd/all_to_all_single", says=r"to \[0, 1, 2\]: rank 0 is wrong\nat \[1\]")
class ExchangesLoseTheGradientOfAFixedPoint(Backward):
    """What a rank has sent to itself alone gets no gradient."""

    base = "impl"
    function = nn._AlltoAllSingle

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        sizes = ctx.input_split_sizes
        if sizes and sizes[dist.get_rank(ctx.group)] == sum(sizes):
            gradient = torch.zeros_like(gradient)
        return _exchanged_back(ctx, gradient)


@breaks("functional/all_to_all-gradient", says=r"to \[0, 1, 2\]: rank 0 is wrong\nat \[1\]")
class FunctionalExchangesLoseTheGradientOfAFixedPoint(Functional):
    """What a rank has sent to itself alone gets no gradient."""

    base = "impl"

    @staticmethod
    def all_to_all_single_autograd(right: Any, x: Tensor, out: Any, into: Any, group: Any) -> Any:
        if into[dist.get_rank(group)] == sum(into):
            return right(x.detach(), out, into, group) + 0 * x
        return right(x, out, into, group)
