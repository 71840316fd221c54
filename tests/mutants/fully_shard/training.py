"""Mutants of conformance/spec/fully_shard/training.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from impl.fully_shard import collectives
from impl.fully_shard.parameter import ShardedParameter
from impl.fully_shard.unit import Phase, Unit
from tests.mutants.fsdp.kit import Swapped, nothing
from tests.mutants.fully_shard.construction import _thaw
from tests.mutants.fully_shard.kit import first, fully_shard_then, then
from tests.mutants.kit import breaks


@breaks("fully_shard/losses", says="loss of forward 1")
class GathersInReverse(Swapped):
    """The ranks' parts of parameters are put together from the last to the first."""

    swaps = (
        (
            collectives,
            "spread",
            lambda right: lambda parameters, rows: right(parameters, rows.flip(0)),
        ),
    )


@breaks("fully_shard/gradients", says="grads of")
@breaks("fully_shard/training", says="grads of")
@breaks("fully_shard/root-alone", says="grads of")
@breaks("fully_shard/unit-of-several-modules", says="grads of")
@breaks("fully_shard/adaptive-optimizer", says="grads of")
class AddsGradientsUp(Swapped):
    """The sum of the ranks' gradients, and not their mean."""

    swaps = ((collectives, "divide", nothing),)


def _without_small_ones(gradients: Any, parameters: Any, into: Any) -> None:
    for gradient in gradients:
        if len(gradient) < len(into):
            gradient.zero_()


@breaks("fully_shard/small-parameters", says="grads of")
class LosesGradientsOfFewRows(Swapped):
    """Of parameters with fewer rows than there are ranks."""

    swaps = ((collectives, "lay_out", first(_without_small_ones)),)


def _divided_twice(right: Any) -> Any:
    def wrong(division: Any, dtype: Any, *args: Any) -> Any:
        how = right(division, dtype, *args)
        twice = dtype == torch.float32
        return replace(how, after=how.after * division.rank_count) if twice else how

    return wrong


@breaks("fully_shard/float32", says="grads of")
class DividesAverages(Swapped):
    """What the backend has averaged is divided once more."""

    swaps = ((collectives, "averaging", _divided_twice),)


@breaks("fully_shard/frozen-unit", says="grads of")
@breaks("fully_shard/frozen-parts", says="grads of")
@breaks("fully_shard/trace-when-frozen", says="the traces part")
class TrainsFrozenParameters(Swapped):
    swaps = (fully_shard_then(_thaw),)


def _forget(parameter: Any, shard: Any) -> None:
    parameter.sharded.grad = None


@breaks("fully_shard/accumulates", says="grads of")
class ForgetsEarlierGradients(Swapped):
    """Each reduction replaces the gradient."""

    swaps = ((ShardedParameter, "put_gradient", first(_forget)),)


def _begin(self: Any) -> None:
    self.ended = False


def _once(right: Any) -> Any:
    def wrong(self: Any) -> None:
        if not self.ended:
            right(self)
        self.ended, self.phase = True, Phase.REDUCED

    return wrong


@breaks("fully_shard/two-forwards", says="grads of")
class ReducesAfterTheLastForwardAlone(Swapped):
    """Of several forwards of a unit, the backward through the last one ends its step."""

    swaps = ((Unit, "begin_forward", first(_begin)), (Unit, "end_backward", _once))


def _unless_kept(right: Any) -> Any:
    return lambda self: None if self.after_forward is None else right(self)


@breaks("fully_shard/kept-parameters", says="loss of forward|grads of")
@breaks("fully_shard/sharded-after-backward", says="end: whole are")
class KeepsOldParameters(Swapped):
    """What is kept after the forward is kept after the backward, and used in the next step."""

    swaps = ((Unit, "shard_fully", _unless_kept),)


def _reversed_in_backward(right: Any) -> Any:
    def wrong(self: Any) -> None:
        if self._gathered is not None and self.phase is Phase.BACKWARD:
            self._gathered = self._gathered.flip(0)
        right(self)

    return wrong


@breaks("fully_shard/freed-parameters", says="grads of")
@breaks("fully_shard/units-in-units", says="grads of")
class GathersInReverseInBackward(Swapped):
    """What is gathered for the backward comes from the last rank to the first."""

    swaps = ((Unit, "wait", _reversed_in_backward),)


def _clear(_: Any, parameter: Any, division: Any) -> None:
    parameter._resharded = torch.zeros_like(parameter._resharded)


@breaks("fully_shard/smaller-group-after-forward", says="grads of|loss of forward")
class KeepsZerosAfterTheForward(Swapped):
    """The parts that a smaller group keeps between forward and backward are zeros."""

    swaps = ((ShardedParameter, "to_resharded", then(_clear)),)
