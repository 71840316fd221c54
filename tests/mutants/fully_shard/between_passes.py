"""Mutants of conformance/spec/fully_shard/between_passes.py."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from impl.fully_shard import collectives
from impl.fully_shard import state as state_module
from impl.fully_shard.module import FSDPModule
from impl.fully_shard.parameter import ShardedParameter
from impl.fully_shard.state import State
from impl.fully_shard.unit import Phase, Shape, Unit
from tests.mutants.fsdp.kit import Swapped, nothing
from tests.mutants.fully_shard.kit import first, then
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


def _but_for_keywords(right: Any) -> Any:
    return lambda self, args, kwargs: (right(self, args, kwargs)[0], kwargs)


@breaks("fully_shard/forward-method-casts", says="dtype of the result|raised")
class CastsNoKeywords(Swapped):
    swaps = ((State, "_cast_inputs", _but_for_keywords),)


def _in_training(right: Any) -> Any:
    return lambda self, output: right(self, output) if torch.is_grad_enabled() else output


@breaks("fully_shard/output-dtype-everywhere", says="outputs in training and evaluation")
class CastsNoOutputsOfEvaluations(Swapped):
    swaps = ((State, "_cast_output", _in_training),)


def _but_for_dictionaries(right: Any) -> Any:
    return lambda self, output: output if isinstance(output, dict) else right(self, output)


@breaks("fully_shard/output-dtype-everywhere", says="outputs in training and evaluation")
class CastsNoOutputsInDictionaries(Swapped):
    swaps = ((State, "_cast_output", _but_for_dictionaries),)


def _integers_too(_: Any, parameter: Any, policy: Any) -> None:
    if policy.param_dtype not in (None, parameter.dtype):
        parameter.compute_dtype = policy.param_dtype


@breaks("fully_shard/integer-parameter", says="numbers under")
class ComputesWithIntegersInLowPrecision(Swapped):
    swaps = ((ShardedParameter, "set_precision", then(_integers_too)),)


def _but_for_recomputation(right: Any) -> Any:
    def wrong(self: Any, module: Any, args: Any, kwargs: Any) -> Any:
        is_recomputed = self.phase is Phase.BACKWARD
        result = right(self, module, args, kwargs)
        return (args, kwargs) if is_recomputed else result

    return wrong


@breaks("fully_shard/recomputation-casts", says="raised|gradient of")
class CastsNothingWhenItRecomputes(Swapped):
    swaps = ((State, "before_forward", _but_for_recomputation),)


def _refuse_two_dtypes(unit: Any) -> None:
    if len({parameter.sharded.dtype for parameter in unit.parameters}) > 1:
        raise AssertionError("FSDP expects uniform original parameter dtype")


@breaks("fully_shard/frozen-of-another-dtype", says="raised")
class RefusesFrozenParametersOfAnotherDtype(Swapped):
    swaps = ((Unit, "prepare", first(_refuse_two_dtypes)),)


def _divided_afterwards(right: Any) -> Any:
    def wrong(*args: Any) -> Any:
        how = right(*args)
        return dataclasses.replace(how, before=1, after=how.before * how.after)

    return wrong


@breaks("fully_shard/range-of-float16", says="gradient of")
class AddsUpBeforeItDivides(Swapped):
    swaps = ((collectives, "averaging", _divided_afterwards),)


def _not_afterwards(right: Any) -> Any:
    return lambda *args: dataclasses.replace(right(*args), after=1)


@breaks("fully_shard/divide-factor-in-float32", says="gradient of")
class DoesNotDivideSums(Swapped):
    swaps = ((collectives, "averaging", _not_afterwards),)


def _averaged_twice(right: Any) -> Any:
    def wrong(*args: Any) -> Any:
        how = right(*args)
        if how.scatter_op != dist.ReduceOp.AVG:
            return how
        return dataclasses.replace(how, replica_op=dist.ReduceOp.AVG)

    return wrong


@breaks("fully_shard/divide-factor-in-float32", says="gradient of")
class AveragesOverReplicasToo(Swapped):
    swaps = ((collectives, "averaging", _averaged_twice),)


def _but_for_replicas(right: Any) -> Any:
    def wrong(self: Any) -> None:
        partial = self._partial
        right(self)
        self._partial = partial

    return wrong


@breaks("fully_shard/reset-between-replicas", says="gradient of")
class KeepsWhatReplicasHaveNotAdded(Swapped):
    swaps = ((Unit, "reset", _but_for_replicas),)


def _of_shards_alone(right: Any) -> Any:
    def wrong(self: Any, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        adds = [unit.adds_replicas for unit in self._units]
        right(self, requires_gradient_sync, recurse=recurse)
        for unit, before in zip(self._units, adds, strict=True):
            unit.adds_replicas = before

    return wrong


@breaks("fully_shard/sync-includes-replicas", says="gradient of")
class SynchronizesShardsAlone(Swapped):
    swaps = ((FSDPModule, "set_requires_gradient_sync", _of_shards_alone),)


def _but_for_empty_ones(right: Any) -> Any:
    def wrong(self: Any) -> None:
        place = self.places[0]
        found: Any = getattr(place.module, place.name)
        if found.is_meta or found.to_local().numel():
            right(self)
        else:
            self.sharded = found

    return wrong


@breaks("fully_shard/empty-shards-from-meta", says="raised|output")
class GivesNoMemoryToEmptyShards(Swapped):
    swaps = ((ShardedParameter, "adopt_changes", _but_for_empty_ones),)


def _unless_partly(right: Any) -> Any:
    def wrong(self: Any, *args: Any) -> None:
        if self.shape is not Shape.RESHARDED:
            right(self, *args)

    return wrong


@breaks("fully_shard/saved-when-partly-sharded", says="shapes in the state dict")
class SavesThePartsOfFewerRanks(Swapped):
    swaps = ((Unit, "_before_state_dict", _unless_partly),)


@breaks("fully_shard/reshard-when-partly-sharded", says="shapes")
class TakesThePartsOfFewerRanksForShards(Swapped):
    swaps = ((Unit, "shard", _unless_partly),)
