"""Mutants of conformance/spec/fully_shard/between_passes.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from impl.fully_shard import state as state_module
from impl.fully_shard.module import FSDPModule
from impl.fully_shard.parameter import ShardedParameter
from impl.fully_shard.state import State
from impl.fully_shard.unit import Phase, Unit
from tests.mutants.fsdp.kit import Swapped, nothing
from tests.mutants.fully_shard.kit import first
from tests.mutants.kit import breaks


def _if_it_took_part(right: Any) -> Any:
    return lambda self: None if self.phase is Phase.IDLE else right(self)


@breaks("fully_shard/not-called-in-the-last-backward", says="gradient of b")
@breaks("fully_shard/not-in-the-loss", says="sharded after the backward")
class LeavesOutWhatTheBackwardLeavesOut(Swapped):
    """What earlier backwards gave is not reduced then, and what is whole stays so."""

    swaps = ((Unit, "end_backward", _if_it_took_part),)


@breaks("fully_shard/gathered-for-nothing", says="output of the second forward")
class UsesWhatWasGatheredForNothing(Swapped):
    swaps = ((Unit, "drop_gather", nothing),)


def _appended(right: Any) -> Any:
    return lambda self, hook, *, prepend=False, **kwargs: right(self, hook, **kwargs)


@breaks("fully_shard/hooks-from-before", says="sharded in hooks")
class GathersAfterTheHooksFromBefore(Swapped):
    swaps = ((nn.Module, "register_forward_pre_hook", _appended),)


def _prepended(right: Any) -> Any:
    return lambda self, hook, **kwargs: right(self, hook, **{**kwargs, "prepend": True})


@breaks("fully_shard/hooks-from-before", says="sharded in hooks")
class ShardsBeforeTheHooksFromBefore(Swapped):
    swaps = ((nn.Module, "register_forward_hook", _prepended),)


def _with_one_hook(right: Any) -> Any:
    def wrong(self: Any, shard: Tensor) -> None:
        hooks = self.sharded._post_accumulate_grad_hooks or {}
        later = dict(list(hooks.items())[1:])
        for key in later:
            del hooks[key]
        right(self, shard)
        hooks.update(later)

    return wrong


@breaks("fully_shard/several-hooks-of-a-shard", says="hooks that have run")
class RunsOneHookOfAShard(Swapped):
    swaps = ((ShardedParameter, "put_gradient", _with_one_hook),)


def _not_below(right: Any) -> Any:
    def wrong(tree: Any) -> list[Tensor]:
        if isinstance(tree, dict):
            return [value for value in tree.values() if isinstance(value, Tensor)]
        return list(right(tree))

    return wrong


@breaks("fully_shard/nested-output", says="gradient of|raised")
class LooksAtTheTopOfOutputs(Swapped):
    """Tensors in lists in a dictionary do not bring parameters back."""

    swaps = ((state_module, "tensors_in", _not_below),)


def _note_evaluation(state: Any, output: Any) -> None:
    if not torch.is_grad_enabled():
        state.step.has_evaluated = True


def _unless_it_has_evaluated(right: Any) -> Any:
    def wrong(self: Any, gradient: Tensor) -> None:
        if not getattr(self.step, "has_evaluated", False):
            right(self, gradient)

    return wrong


@breaks("fully_shard/evaluation-before-the-backward", says="gradient of|raised")
class ForgetsTheBackwardWhenItEvaluates(Swapped):
    swaps = (
        (State, "_call_before_backward_of", first(_note_evaluation)),
        (State, "_before_backward", _unless_it_has_evaluated),
    )


def _as_a_new_tensor(right: Any) -> Any:
    def wrong(self: Any, shard: Tensor) -> None:
        have, self.sharded.grad = self.sharded.grad, None
        right(self, shard if have is None else have.to_local() + shard)

    return wrong


@breaks("fully_shard/one-gradient", says="the same tensor")
class MakesANewGradientEachTime(Swapped):
    swaps = ((ShardedParameter, "put_gradient", _as_a_new_tensor),)


@breaks("fully_shard/converted-after-an-evaluation", says="sharded|dtype|raised")
class ConvertsWhatIsWhole(Swapped):
    swaps = ((FSDPModule, "reshard", nothing),)


def _but_for_the_root(right: Any) -> Any:
    def wrong(self: Any, reshard_after_forward: bool, recurse: bool = True) -> None:
        state = self._get_fsdp_state()
        chooses = state.chooses_after_forward
        right(self, reshard_after_forward, recurse)
        state.chooses_after_forward = chooses

    return wrong


@breaks("fully_shard/sharded-root", says="sharded after the forward")
class KeepsTheRootWholeAnyway(Swapped):
    swaps = ((FSDPModule, "set_reshard_after_forward", _but_for_the_root),)
