"""Mutants of conformance/spec/fully_shard/prefetching.py."""

from __future__ import annotations

from typing import Any

from impl.fully_shard.module import FSDPModule
from impl.fully_shard.state import State
from impl.fully_shard.unit import Phase
from tests.mutants.fsdp.kit import Swapped, always, nothing
from tests.mutants.fully_shard.kit import then
from tests.mutants.kit import breaks


def _all(_: Any, state: Any, *args: Any) -> None:
    for unit in state._all_units():
        unit.gather(ahead_of=Phase.FORWARD)


@breaks("fully_shard/no-forward-prefetch", says="forward: the traces part")
class GathersAllUnitsAtTheBeginning(Swapped):
    swaps = ((State, "_begin_step", then(_all)),)


@breaks("fully_shard/backward-prefetch", says="backward: the traces part")
class GathersNothingAhead(Swapped):
    swaps = ((State, "_state_to_prefetch", always(())),)


def _also_without_units(_: Any, state: Any, output: Any) -> None:
    if not state.units:
        state.step.forward_order.append(state)


@breaks("fully_shard/prefetch-past-empty", says="backward")
class PrefetchesModulesWithoutParameters(Swapped):
    swaps = ((State, "_end_forward", then(_also_without_units)),)


@breaks("fully_shard/forward-prefetch", says="forward: the traces part")
@breaks("fully_shard/several-in-forward", says="forward: the traces part")
class IgnoresWhatToPrefetchInForward(Swapped):
    swaps = ((FSDPModule, "set_modules_to_forward_prefetch", nothing),)


def _added(right: Any) -> Any:
    def wrong(self: Any, modules: Any) -> None:
        before = self._get_fsdp_state().gather_ahead_in_forward
        right(self, modules)
        self._get_fsdp_state().gather_ahead_in_forward += before

    return wrong


@breaks("fully_shard/forward-prefetch-anew", says="forward: the traces part")
class PrefetchesWhatWasNamedBefore(Swapped):
    swaps = ((FSDPModule, "set_modules_to_forward_prefetch", _added),)


@breaks("fully_shard/several-in-backward", says="backward: the traces part")
@breaks("fully_shard/no-backward-prefetch", says="backward: the traces part")
class IgnoresWhatToPrefetchInBackward(Swapped):
    swaps = ((FSDPModule, "set_modules_to_backward_prefetch", nothing),)


@breaks("fully_shard/no-unshard-in-backward", says="gathers in the backward")
class GathersWhatNoBackwardNeeds(Swapped):
    """set_unshard_in_backward has no effect."""

    swaps = ((FSDPModule, "set_unshard_in_backward", nothing),)
