"""Faults of FSDP's runtime: what is exchanged, in which order, and what is freed when."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import BackwardPrefetch

from impl.fsdp.build import construct as build
from impl.fsdp.flat_param import config, handle, layout
from impl.fsdp.flat_param import gradients as gradients_module
from impl.fsdp.step import (
    backward,
    forward,
    lazy_init,
    order,
    reduction,
    sharding,
    tree,
    unshard_params,
)
from tests.mutants.fsdp.kit import Swapped, always, as_property, nothing
from tests.mutants.kit import breaks

_KEEPS = (config.HandleConfig, "reshards_after_forward", as_property(False))
_FREES = (config.HandleConfig, "reshards_after_forward", as_property(True))


@breaks("fsdp/trace-full-shard", says="the traces part at operation")
@breaks("fsdp/trace-checkpointed", says="the traces part at operation")
class GathersOnceInFullShard(Swapped):
    swaps = (_KEEPS,)


@breaks("fsdp/trace-shard-grad-op", says="the traces part at operation")
class GathersTwiceInShardGradOp(Swapped):
    swaps = (_FREES,)


@breaks("fsdp/gather-once", says="the backward gathers")
class GathersAgainInTheBackward(Swapped):
    swaps = (_FREES,)


@breaks("fsdp/trace-prefetch", says="the traces part at operation")
class NeverPrefetches(Swapped):
    swaps = ((sharding, "unit_to_prefetch", always(None)),)


@breaks("fsdp/prefetch-before", says="gathers after each gradient")
class GathersTooLate(Swapped):
    """BACKWARD_PRE is taken for nothing."""

    swaps = ((sharding, "unit_to_prefetch", always(None)),)


@breaks("fsdp/forward-prefetch", says="gathers before each forward")
class DoesNotPrefetchInTheForward(Swapped):
    swaps = ((order.ExecutionOrder, "after_in_forward", always(None)),)


def _early(right: Any) -> Any:
    def wrong(order: Any, unit: int, state: Any, backward: Any, forward: bool) -> Any:
        return right(order, unit, state, BackwardPrefetch.BACKWARD_PRE, forward)

    return wrong


@breaks("fsdp/prefetch-after", says="gathers after each gradient")
@breaks("fsdp/no-prefetch", says="gathers after each gradient")
class PrefetchesBeforeWhenAskedForAfter(Swapped):
    swaps = ((sharding, "unit_to_prefetch", _early),)


@breaks("fsdp/trace-accumulation", says="the traces part at operation")
class ReducesUnderNoSync(Swapped):
    swaps = (
        (
            backward,
            "_reduce_or_keep",
            lambda _: lambda state, handle: _reduce(state, handle),
        ),
    )


def _reduce(state: Any, handle: Any) -> None:
    handle.has_reduced = True
    reduction.reduce_gradient(state, handle)


@breaks("fsdp/scatter-dtype", says="want (b?float32|bfloat16)|issued .'all_reduce bfloat16")
@breaks("fsdp/with-torch-low-precision", says="ranks disagree on dtype|raised|is wrong")
class ReducesInTheDtypeOfTheGradient(Swapped):
    """The reduce_dtype never reaches the wire (pytorch#63375, for a hook of DDP)."""

    swaps = ((reduction, "_reduce_dtype", lambda _: lambda state, handle, grad: grad.dtype),)


@breaks("fsdp/with-torch-original-parameters", says="raised|is wrong|waited")
class AlignsToThirtyTwoBytes(Swapped):
    """A layout of its own: no rank of torch's agrees."""

    swaps = ((handle, "alignment_numel", lambda right: lambda size: 2 * right(size)),)


@breaks("fsdp/gather-sizes", says="the forward gathers")
class PadsEveryChunk(Swapped):
    """One element more a rank than is needed."""

    swaps = ((layout, "chunk_numel", lambda right: lambda *args: right(*args) + 1),)


@breaks("fsdp/silent-construction", says="construction: the traces part")
class MeetsInTheConstructor(Swapped):
    swaps = (
        (
            build,
            "_make_handle",
            lambda right: lambda state, *args: _after_meeting(right, state, *args),
        ),
    )


def _after_meeting(right: Any, state: Any, *args: Any) -> Any:
    dist.barrier(state.process_group)
    return right(state, *args)


@breaks("fsdp/ranks-that-differ", says="said nothing|waited|raised")
class DoesNotCompareUnits(Swapped):
    """Ranks compute with each other's units (pytorch#170667)."""

    swaps = ((forward, "_check_same_unit_on_all_ranks", nothing),)


@breaks("fsdp/order-that-changes", says="iterations that warn")
class SaysNothingOfAnotherOrder(Swapped):
    swaps = ((order.ExecutionOrder, "check_forward", always(None)),)


# Memory


@breaks("fsdp/freed-after-forward", says="unsharded at the forwards")
class KeepsAllUnitsAfterForward(Swapped):
    swaps = (_KEEPS,)


@breaks("fsdp/kept-after-forward", says="unsharded at the forwards")
class FreesUnitsThatAreToBeKept(Swapped):
    swaps = (_FREES,)


@breaks("fsdp/freed-in-backward", says="unsharded at the backwards|last at the backwards")
@breaks("fsdp/two-units-at-once", says="unsharded at the backwards")
@breaks("fsdp/no-sync-frees", says="unsharded at the backwards")
class KeepsUnitsInTheBackward(Swapped):
    """Everything is freed at the end alone."""

    swaps = ((backward, "_reshard_after_backward", nothing),)


@breaks("fsdp/one-unit-at-once", says="unsharded at the backwards")
class KeepsUnitsThatAreDone(Swapped):
    swaps = ((backward, "_reshard_after_backward", nothing),)


@breaks("fsdp/freed-when-frozen-in-front", says="unsharded after each backward")
@breaks("fsdp/freed-when-unused", says="unsharded after each backward")
class LeavesUnusedUnitsUnsharded(Swapped):
    """pytorch#83129"""

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


@breaks("fsdp/freed-in-eval", says="unsharded at the forwards|after the forward")
class EvaluationKeepsEverything(Swapped):
    swaps = (_KEEPS,)


@breaks("fsdp/freed-after-summon", says="bytes are left")
class SummonsAndForgetsToFree(Swapped):
    swaps = (
        (
            unshard_params,
            "reshard",
            lambda right: lambda state, handle, free: right(state, handle, free=False),
        ),
    )


# Full parameters and norms


@breaks("fsdp/summon-writes-back", says="values")
class SummonLosesChanges(Swapped):
    swaps = ((handle.FlatParamHandle, "write_back_shard", nothing),)


def _always_writing(right: Any) -> Any:
    def wrong(state: Any, options: Any, *, discard: bool = False) -> Any:
        return right(state, unshard_params.SummonOptions(writeback=True))

    return wrong


@breaks("fsdp/summon-discards", says="is wrong")
class SummonKeepsChanges(Swapped):
    swaps = ((unshard_params, "unsharded", _always_writing),)


@breaks("fsdp/summon-gradients", says="is wrong|got")
class SummonLosesChangesOfGradients(Swapped):
    swaps = ((gradients_module, "write_back_grad", nothing),)


@breaks("fsdp/norm", says="is wrong")
class NormOfTheOwnShard(Swapped):
    """RLinf#1558"""

    swaps = ((dist, "all_reduce", nothing),)


def _over_all_ranks(right: Any) -> Any:
    def wrong(tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, **kwargs: Any) -> Any:
        return right(tensor, op=op, group=None if tensor.numel() == 1 else group, **kwargs)

    return wrong


@breaks("fsdp/norm-hybrid", says="is wrong")
class NormCountsReplicas(Swapped):
    """VeOmni#184"""

    swaps = ((dist, "all_reduce", _over_all_ranks),)


@breaks("fsdp/norm-clips", says="norms before and after clipping")
class NormIsComputedAndNothingClipped(Swapped):
    swaps = ((torch, "clamp", always(torch.ones(()))),)


# Precision and settings


@breaks("fsdp/cast-inputs", says="x: float32, want bfloat16|raised")
class InputsAreNotCast(Swapped):
    swaps = ((tree, "cast_floating", lambda _: lambda value, dtype: value),)


@breaks("fsdp/keep-low-precision-gradients", says=r"want (bfloat16|'torch\.bfloat16')")
class GradientsAreAlwaysInFullPrecision(Swapped):
    swaps = (
        (config.HandleConfig, "keeps_low_precision_grads", as_property(False)),
        (gradients_module, "_cast_grad", nothing),
    )


@breaks("fsdp/homogeneous-settings", says="was to raise")
class TakesDifferentSettings(Swapped):
    swaps = ((lazy_init, "_check_homogeneous", nothing),)


@breaks("fsdp/wrapped-twice", says="was to raise")
class WrapsTwice(Swapped):
    swaps = ((build, "is_wrapped", always(False)),)


_kept: list[torch.Tensor] = []


def _and_keep(right: Any) -> Any:
    def wrong(state: Any, handle: Any) -> None:
        _kept.append(handle.flat_param.grad.clone())
        right(state, handle)

    return wrong


@breaks("fsdp/steady-memory", says="32 steps have left memory")
class KeepsGradientsThatWereReduced(Swapped):
    swaps = ((backward, "reduce_gradient", _and_keep),)
