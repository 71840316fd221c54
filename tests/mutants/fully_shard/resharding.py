"""Mutants of conformance/spec/fully_shard/resharding.py."""

from __future__ import annotations

from typing import Any

from impl.fully_shard.memory import WholeMemory
from impl.fully_shard.module import FSDPModule
from impl.fully_shard.parameter import ShardedParameter
from impl.fully_shard.state import State
from tests.mutants.fsdp.kit import Swapped, nothing
from tests.mutants.fully_shard.kit import then
from tests.mutants.kit import breaks


def _free(_: Any, state: Any) -> None:
    for unit in state.units:
        unit.after_forward = unit.division


@breaks("fully_shard/root-kept", says="the root is whole")
class FreesTheRoot(Swapped):
    """The root is sharded after the forward, unasked."""

    swaps = ((State, "_find_root", then(_free)),)


@breaks("fully_shard/freed-after-forward", says="whole are")
@breaks("fully_shard/one-unit-at-once", says="backward: whole are")
@breaks("fully_shard/freed-after-backward", says="end: whole are")
class FreesNoMemory(Swapped):
    """Modules show shards, and the memory of whole parameters stays."""

    swaps = ((WholeMemory, "free", nothing),)


@breaks("fully_shard/changed-after-forward", says="between: whole are")
class KeepsTheFirstChoice(Swapped):
    """set_reshard_after_forward has no effect."""

    swaps = ((FSDPModule, "set_reshard_after_forward", nothing),)


@breaks("fully_shard/kept-after-backward", says="end: whole are")
@breaks("fully_shard/no-gather-when-kept", says="gathers of the second step")
class AlwaysFreesAfterTheBackward(Swapped):
    """set_reshard_after_backward has no effect."""

    swaps = ((FSDPModule, "set_reshard_after_backward", nothing),)


def _of_the_padded_whole(_: Any, parameter: Any, division: Any) -> None:
    place = parameter.places[0]
    local = getattr(place.module, place.name).detach().to_local()
    part = parameter.gathered.view(division.shard_count, -1)[division.shard_rank]
    shown = part[: local.numel()]
    local.view(-1)[: shown.numel()] = shown


@breaks("fully_shard/smaller-uneven-shards", says="after the forward")
class CutsSmallerShardsFromThePaddedWhole(Swapped):
    swaps = ((ShardedParameter, "to_resharded", then(_of_the_padded_whole)),)
