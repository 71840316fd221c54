"""Mutants of conformance/spec/fully_shard/partial_use.py."""

from __future__ import annotations

from typing import Any

import torch

from impl.fully_shard.module import FSDPModule
from impl.fully_shard.parameter import ShardedParameter
from impl.fully_shard.state import State
from impl.fully_shard.unit import Unit
from tests.mutants.fsdp.kit import Swapped, nothing
from tests.mutants.fully_shard.construction import _thaw
from tests.mutants.fully_shard.kit import first, fully_shard_then, then
from tests.mutants.kit import breaks


def _with_zeros(right: Any) -> Any:
    return lambda self, zeros_for_none: right(self, True)


@breaks("fully_shard/unused-unit", says="gradients of the unused unit|raised")
@breaks("fully_shard/unused-parameter", says="gradient of an unused parameter")
class GivesZerosToWhatIsUnused(Swapped):
    swaps = ((ShardedParameter, "take_gradient", _with_zeros),)


@breaks("fully_shard/frozen-is-not-reduced", says="reductions")
class ReducesFrozenUnits(Swapped):
    swaps = (fully_shard_then(_thaw),)


def _not_followed(right: Any) -> Any:
    def wrong(self: Any) -> None:
        wanted = self.sharded.requires_grad
        self.sharded.requires_grad_(True)
        right(self)
        self.sharded.requires_grad_(wanted)

    return wrong


@breaks("fully_shard/frozen-later", says="reductions when frozen")
class DoesNotFollowWhatIsFrozen(Swapped):
    """Whole parameters require gradients whatever their shards do."""

    swaps = ((ShardedParameter, "to_unsharded", _not_followed),)


def _twice(right: Any) -> Any:
    def wrong(self: Any, shard: Any) -> None:
        right(self, shard * (1 + self.forwards))

    return wrong


def _count(unit: Any, is_recomputed: bool) -> None:
    for parameter in unit.parameters:
        parameter.forwards = getattr(parameter, "forwards", -1) + 1


@breaks("fully_shard/dropped-forward", says="gradient of")
@breaks("fully_shard/evaluation-before-training", says="gradient of")
@breaks("fully_shard/checkpoint-inside", says="grads of")
@breaks("fully_shard/checkpoint-around", says="grads of")
@breaks("fully_shard/checkpoint-below", says="grads of")
@breaks("fully_shard/checkpoint-reentrant", says="grads of")
class MultipliesGradientsByForwards(Swapped):
    """A gradient is as many times too large as there were forwards before it."""

    swaps = ((Unit, "end_forward", first(_count)), (ShardedParameter, "put_gradient", _twice))


def _replace(parameter: Any, shard: Any) -> None:
    parameter.sharded.grad = None


@breaks("fully_shard/retained-graph", says="gradient of")
class KeepsTheLastGradientAlone(Swapped):
    swaps = ((ShardedParameter, "put_gradient", first(_replace)),)


def _of_this_backward(right: Any) -> Any:
    before: dict[Any, Any] = {}

    def wrong(self: Any) -> None:
        for parameter in self.parameters:
            grad = None if parameter.unsharded is None else parameter.unsharded.grad
            if grad is not None and torch.equal(grad, before.get(parameter, grad + 1)):
                parameter.forget_gradient()
            elif grad is not None:
                before[parameter] = grad.clone()
        right(self)

    return wrong


@breaks("fully_shard/unused-in-the-last-backward", says="gradient of")
class LosesWhatTheLastBackwardDoesNotUse(Swapped):
    swaps = ((Unit, "end_backward", _of_this_backward),)


@breaks("fully_shard/unused-on-a-rank", says="raised|there is a gradient|waited|still running")
class CountsNothingAsZero(Swapped):
    """set_reduce_scatter_unused_params has no effect."""

    swaps = ((FSDPModule, "set_reduce_scatter_unused_params", nothing),)


def _frozen_or_not(right: Any) -> Any:
    def wrong(self: Any, zeros_for_none: bool) -> Any:
        gradient = right(self, zeros_for_none)
        if gradient is None and zeros_for_none and self.unsharded is not None:
            return torch.zeros_like(self.unsharded)
        return gradient

    return wrong


@breaks("fully_shard/unused-on-a-rank", says="gradient of a frozen parameter")
class CountsFrozenOnesAsZero(Swapped):
    swaps = ((ShardedParameter, "take_gradient", _frozen_or_not),)


def _gather_again(state: Any, module: Any, *args: Any) -> None:
    for unit in state.units:
        if unit.phase.name == "BACKWARD":
            unit.shard_fully()


@breaks("fully_shard/trace-of-recomputation", says="the traces part|raised")
class GathersForTheRecomputation(Swapped):
    """What a recomputation finds whole is freed and gathered once more."""

    swaps = ((State, "before_forward", first(_gather_again)),)


def _clear(_: Any, unit: Any) -> None:
    for parameter in unit.parameters:
        parameter.flat_shard.zero_()


@breaks("fully_shard/forward-that-raises", says="gradient of")
class ResetsParameters(Swapped):
    """A reset leaves zeros in the shards."""

    swaps = ((Unit, "reset", then(_clear)),)


@breaks("fully_shard/backward-that-raises", says="gradient of|raised")
class ResetsNothing(Swapped):
    swaps = ((FSDPModule, "reset_iter_state", nothing),)


@breaks("fully_shard/reset-of-an-accumulation", says="gradient of")
class KeepsUnreducedGradients(Swapped):
    swaps = ((ShardedParameter, "forget_gradient", nothing),)
