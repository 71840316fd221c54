"""Mutants of conformance/spec/fsdp/memory.py."""

from __future__ import annotations

import weakref
from typing import Any

from impl.fsdp.checkpoint import state_dict
from impl.fsdp.flat_param import handle, views
from impl.fsdp.step import backward, forward, sharding, unshard_params
from tests.mutants.fsdp.kit import FREES, KEEPS, Swapped, always, nothing
from tests.mutants.kit import breaks


@breaks("fsdp/whole-in-forward", says="'weight' must be 2-D|size mismatch|shapes cannot be")
class ComputesWithShards(Swapped):
    """With original parameters, modules show their shards in the forward."""

    swaps = ((views.OrigParamViews, "show_forward_tensors", nothing),)


@breaks("fsdp/freed-when-frozen", says=r"unsharded at the forwards: got \[\[0, 2\]")
class KeepsFrozenUnits(Swapped):
    swaps = (
        (
            backward,
            "frees_in_backward",
            lambda right: (
                lambda state, handle: handle.flat_param.requires_grad and right(state, handle)
            ),
        ),
    )


@breaks("fsdp/freed-after-state-dict", says="state dict: .* bytes are left")
class StateDictsLeaveUnitsAsTheyAre(Swapped):
    swaps = ((state_dict, "_leave", nothing),)


@breaks("fsdp/freed-after-forward", says="unsharded at the forwards")
@breaks("fsdp/freed-in-eval", says="unsharded at the forwards|after the forward")
class KeepsAllUnitsAfterForward(Swapped):
    swaps = (KEEPS,)


@breaks("fsdp/kept-after-forward", says="unsharded at the forwards")
class FreesUnitsThatAreToBeKept(Swapped):
    swaps = (FREES,)


@breaks("fsdp/freed-in-backward", says="unsharded at the backwards|last at the backwards")
@breaks("fsdp/two-units-at-once", says="unsharded at the backwards")
@breaks("fsdp/no-sync-frees", says="unsharded at the backwards")
@breaks("fsdp/one-unit-at-once", says="unsharded at the backwards")
class KeepsUnitsInTheBackward(Swapped):
    """Units are freed only at the end of the backward."""

    swaps = ((backward, "_reshard_after_backward", nothing),)


@breaks("fsdp/freed-when-frozen-in-front", says="unsharded after each backward")
@breaks("fsdp/freed-when-unused", says="unsharded after each backward")
class LeavesUnusedUnitsUnsharded(Swapped):
    """A unit that the backward does not reach stays unsharded (pytorch#83129)."""

    swaps = ((backward, "_reshard_if_left_unsharded", nothing),)


@breaks("fsdp/freed-when-checkpointed", says="unsharded after the backward|raised")
class LeavesRecomputedUnitsUnsharded(Swapped):
    """What a recomputation gathers is not freed (Megatron-LM#6153)."""

    swaps = (
        (sharding, "frees_in_backward", always(False)),
        (backward, "frees_in_backward", always(False)),
    )


_STAY: weakref.WeakSet[handle.FlatParamHandle] = weakref.WeakSet()


def _with_the_next(right: Any) -> Any:
    def pre_forward(state: Any, args: Any, kwargs: Any) -> Any:
        if state.handle is not None and state.shared.final_callback_queued:
            context = state.shared
            number = context.order.after_in_forward(state.handle.unit)
            if number is not None:
                owner, target = context.owners[number], context.units[number]
                sharding.unshard(owner, target, context.streams.unshard, context.streams.unshard)
                sharding.reshard(owner, target, free=False)
                _STAY.add(target)
        return right(state, args, kwargs)

    return pre_forward


def _unless_it_stays(right: Any) -> Any:
    def reshard(state: Any, target: Any) -> None:
        if target not in _STAY:
            right(state, target)

    return reshard


@breaks("fsdp/freed-when-checkpointed", says="unsharded after the backward with")
class RecomputationGathersWhatIsDone(Swapped):
    """A recomputed forward prefetches the unit after it, whose backward is over."""

    swaps = (
        (forward, "pre_forward", _with_the_next),
        (backward, "_reshard_if_left_unsharded", _unless_it_stays),
    )


@breaks("fsdp/freed-at-the-end", says="after the backward|root after forward")
class LeavesTheRootUnsharded(Swapped):
    swaps = (
        (
            backward,
            "frees_in_backward",
            lambda right: lambda state, handle: not state.is_root and right(state, handle),
        ),
    )


@breaks("fsdp/freed-after-summon", says="bytes are left")
class SummonsAndForgetsToFree(Swapped):
    swaps = (
        (
            unshard_params,
            "reshard",
            lambda right: lambda state, handle, free: right(state, handle, free=False),
        ),
    )
