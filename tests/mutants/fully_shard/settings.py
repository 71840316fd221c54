"""Mutants of conformance/spec/fully_shard/settings.py."""

from __future__ import annotations

from typing import Any

from impl.fully_shard import collectives, comm
from impl.fully_shard.module import FSDPModule
from impl.fully_shard.parameter import ShardedParameter
from impl.fully_shard.unit import Unit
from tests.mutants.fsdp.kit import Swapped, nothing
from tests.mutants.fully_shard.kit import everywhere, first, then
from tests.mutants.kit import breaks


def _lose(_: Any, unit: Any) -> None:
    if not unit.reduces_gradients:
        for parameter in unit.parameters:
            parameter.forget_gradient()


@breaks("fully_shard/sum-of-backwards", says="gradient of")
@breaks("fully_shard/accumulation", says="grads of")
@breaks("fully_shard/accumulation-when-kept", says="grads of")
@breaks("fully_shard/accumulation-of-a-list", says="grads of")
class LosesWhatItDoesNotReduce(Swapped):
    """Gradients of backwards that are not synchronized are gone."""

    swaps = ((Unit, "end_backward", then(_lose)),)


def _forget(unit: Any, *_: Any) -> None:
    for parameter in unit.parameters:
        parameter.forget_gradient()


@breaks("fully_shard/state-dict-between-backwards", says="gradient of")
class StateDictsDropGradients(Swapped):
    """A state dict drops what has not been reduced."""

    swaps = ((Unit, "_before_state_dict", first(_forget)),)


@breaks("fully_shard/no-sync-of-one-unit", says="reductions of the two blocks")
class SynchronizesAllUnitsAlike(Swapped):
    """recurse=False has no effect."""

    swaps = ((FSDPModule, "set_requires_gradient_sync", everywhere),)


def _drop_gradients(self: Any, is_last: bool) -> None:
    for unit in (u for m in self._sharded_modules(True) for u in m._units):
        unit.reduces_gradients = is_last
        for parameter in unit.parameters:
            parameter.forget_gradient()


@breaks("fully_shard/kept-of-one-unit", says="parameters of blocks that are whole: at")
class KeepsAllUnitsAlike(Swapped):
    """recurse=False has no effect."""

    swaps = (
        (FSDPModule, "set_reshard_after_forward", everywhere),
        (FSDPModule, "set_reshard_after_backward", everywhere),
    )


def _with_the_first_alone(right: Any) -> Any:
    def put(self: Any, shard: Any) -> None:
        hooks = self.sharded._post_accumulate_grad_hooks or {}
        kept = dict(hooks)
        if self.sharded.grad is not None:
            hooks.clear()
        right(self, shard)
        hooks.update(kept)

    return put


@breaks("fully_shard/hooks-of-each-backward", says="parameters of which a hook ran")
class RunsHooksWithTheFirstGradient(Swapped):
    swaps = ((ShardedParameter, "put_gradient", _with_the_first_alone),)


@breaks("fully_shard/not-the-last-backward", says="gradient of")
class ReducesTheLastBackwardAlone(Swapped):
    swaps = ((FSDPModule, "set_is_last_backward", lambda _: _drop_gradients),)


@breaks("fully_shard/accumulation-without-gathers", says="gathers of the second forward")
class FreesBetweenBackwards(Swapped):
    """set_reshard_after_backward has no effect."""

    swaps = ((FSDPModule, "set_reshard_after_backward", nothing),)


@breaks("fully_shard/divide-factor-of-one-unit", says=r"gradient of blocks\.")
class DividesInAllUnitsBelow(Swapped):
    """set_gradient_divide_factor is about all units below the module, too."""

    swaps = (
        (
            FSDPModule,
            "set_gradient_divide_factor",
            lambda _: lambda self, factor: self._set(True, divisor=factor),
        ),
    )


@breaks("fully_shard/divide-factor", says="gradient of")
@breaks("fully_shard/sums-with-a-factor", says="gradient of")
class IgnoresTheFactor(Swapped):
    swaps = ((FSDPModule, "set_gradient_divide_factor", nothing),)


def _undivided(right: Any) -> Any:
    def wrong(division: Any, dtype: Any, factor: Any, only_sums: bool) -> Any:
        return right(division, dtype, 1.0 if only_sums else factor, only_sums)

    return wrong


@breaks("fully_shard/sums-alone", says="gradient of")
class LeavesSums(Swapped):
    """With sums alone, nothing is divided."""

    swaps = ((collectives, "averaging", _undivided),)


@breaks("fully_shard/all-reduce-hook", says="hook's tensors")
class CallsNoHook(Swapped):
    swaps = ((FSDPModule, "set_all_reduce_hook", nothing),)


@breaks("fully_shard/own-all-gather", says="calls")
@breaks("fully_shard/own-reduce-scatter", says="calls")
class IssuesItsOwnCollectives(Swapped):
    """Whatever a user has set."""

    swaps = (
        (FSDPModule, "set_custom_all_gather", nothing),
        (FSDPModule, "set_custom_reduce_scatter", nothing),
    )


def _too_large(right: Any) -> Any:
    def wrong(self: Any, size: Any, **kwargs: Any) -> Any:
        memory = right(self, size, **kwargs)
        return memory if self._group is None else memory.clone().fill_(1).view(-1)[:0]

    return wrong


@breaks("fully_shard/memory-of-the-group", says="raised")
class AllocatesNothingFromGroups(Swapped):
    """What is allocated from a group is empty."""

    swaps = ((comm._Allocating, "allocate", _too_large),)


@breaks("fully_shard/own-group-for-gradients", says="reductions in the mesh's group")
class ReducesWhereItGathers(Swapped):
    swaps = ((FSDPModule, "set_separate_reduce_scatter_group", nothing),)


def _sparing(right: Any) -> Any:
    def wrong(self: Any, parameters: Any, gradients: Any) -> None:
        if self.shared.in_flight_max > 1 and len(self.shared.in_flight) == 0:
            for gradient in gradients:
                gradient.zero_()
        right(self, parameters, gradients)

    return wrong


@breaks("fully_shard/several-buffers", says="gradient of")
class SpoilsTheFirstOfSeveralBuffers(Swapped):
    swaps = ((Unit, "_reduce", _sparing),)


def _without_hooks(self: Any, shard: Any) -> None:
    self.sharded.grad = self._layout.shard(shard)


@breaks("fully_shard/optimizer-in-backward", says="grads of")
class RunsNoHooksOfShards(Swapped):
    swaps = ((ShardedParameter, "put_gradient", lambda _: _without_hooks),)
