"""Mutants of conformance/spec/fully_shard/dtypes_and_parts.py."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist

from impl.fully_shard import collectives
from impl.fully_shard.module import FSDPModule
from impl.fully_shard.parameter import ShardedParameter
from impl.fully_shard.state import State
from impl.fully_shard.unit import Phase, Shape, Unit
from tests.mutants.fsdp.kit import Swapped
from tests.mutants.fully_shard.kit import first, then
from tests.mutants.kit import breaks


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
