"""Faults of FSDP's training: gradients that are lost, doubled, local, or of the wrong ranks."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch

from impl.fsdp import api, collectives
from impl.fsdp.build import groups
from impl.fsdp.flat_param import gradients, handle
from impl.fsdp.flat_param import packing as flat_param
from impl.fsdp.step import backward, forward, reduction, state
from tests.mutants.fsdp.kit import Swapped, always, nothing
from tests.mutants.kit import breaks


@breaks("fsdp/full-shard", says="is wrong")
class GradientsAreSums(Swapped):
    """The division by the world size is missing."""

    swaps = ((collectives, "divide", nothing),)


def _twice(right: Any) -> Any:
    def wrong(device: Any, tensor: Any, factor: float) -> None:
        right(device, tensor, factor)
        right(device, tensor, factor)

    return wrong


@breaks("fsdp/shard-grad-op", says="is wrong")
class DividesTwice(Swapped):
    swaps = ((collectives, "divide", _twice),)


def _own_shard_everywhere(_: Any) -> Any:
    def wrong(device: Any, unsharded: torch.Tensor, shard: torch.Tensor, group: Any) -> None:
        unsharded.view(group.size(), -1).copy_(shard)

    return wrong


@breaks("fsdp/losses", says="loss of forward 1: rank . is wrong")
@breaks("fsdp/eval", says="is wrong")
class GathersItsOwnShardAlone(Swapped):
    swaps = ((collectives, "all_gather", _own_shard_everywhere),)


@breaks("fsdp/no-shard", says="is wrong")
@breaks("fsdp/trace-no-shard", says="the traces part at operation")
@breaks("fsdp/gather-never", says="want all-reduces of")
@breaks("fsdp/unused-replicated-unit", says="is wrong")
class ReplicasKeepTheirOwnGradients(Swapped):
    swaps = ((collectives, "all_reduce", nothing),)


@breaks("fsdp/hybrid-shard", says="is wrong")
@breaks("fsdp/trace-hybrid-shard", says="between: the traces part")
class NodesKeepTheirOwnGradients(Swapped):
    """The second reduction of hybrid sharding is missing."""

    swaps = ((collectives, "all_reduce", nothing),)


@breaks("fsdp/hybrid-shard-zero2", says="is wrong")
@breaks("fsdp/with-torch-hybrid", says="is wrong")
class DividesByTheShardingGroupAlone(Swapped):
    """Factors differ between one dimension and two (pytorch#155903)."""

    swaps = ((groups, "divide_factors", lambda right: lambda size: right(max(1, size // 2))),)


@breaks("fsdp/original-parameters", says="is wrong")
@breaks("fsdp/any-model", says="is wrong")
class OriginalParametersGetNoGradients(Swapped):
    swaps = ((gradients, "show_sharded_grads", nothing),)


@breaks("fsdp/adaptive-optimizer", says="is wrong")
class GradientsAreSharesOfSigns(Swapped):
    """Small gradients become as large as others."""

    swaps = (
        (
            collectives,
            "divide",
            lambda right: lambda device, tensor, factor: tensor.sign_().mul_(1e-3),
        ),
    )


def _last_rank_learns_nothing(right: Any) -> Any:
    def wrong(state: Any, handle: Any, shard: torch.Tensor) -> None:
        state.device_handle.flush()
        if handle.rank == handle.world_size - 1:
            shard.zero_()
        right(state, handle, shard)

    return wrong


@breaks("fsdp/tied-weights", says="is wrong")
class TheLastRankNeverUpdates(Swapped):
    """pytorch#176076"""

    swaps = ((reduction, "_finish", _last_rank_learns_nothing),)


def _padded_in_front(right: Any) -> Any:
    def wrong(device: Any, tensor: torch.Tensor, dtype: Any, padded_numel: int) -> torch.Tensor:
        result: torch.Tensor = right(device, tensor, dtype, padded_numel)
        return result.roll(padded_numel - tensor.numel())

    return wrong


@breaks("fsdp/uneven-sizes", says="is wrong")
@breaks("fsdp/with-torch", says="is wrong")
class PadsInFront(Swapped):
    """The padding comes before the gradient instead of behind it."""

    swaps = ((reduction, "_cast_and_pad", _padded_in_front),)


@breaks("fsdp/frozen-unit", says="is wrong")
class FrozenUnitsAreTrained(Swapped):
    swaps = (
        (
            handle,
            "make_flat_parameter",
            lambda right: lambda data, requires_grad: right(data, requires_grad=True),
        ),
    )


@breaks("fsdp/accumulates", says="is wrong")
@breaks("fsdp/cpu-offload-accumulates", says="is wrong")
class KeepsTheLastGradientAlone(Swapped):
    swaps = ((reduction, "_accumulate", lambda _: lambda device, handle, grad: grad),)


def _twice_over(right: Any) -> Any:
    def wrong(state: Any, handle: Any) -> None:
        grad = handle.flat_param.grad.detach().clone()
        right(state, handle)
        handle.flat_param.grad = grad
        right(state, handle)

    return wrong


@breaks("fsdp/same-unit-twice", says="is wrong|raised")
class ReducesTwice(Swapped):
    """The hook after the backward fires repeatedly (fairscale#513)."""

    swaps = ((backward, "reduce_gradient", _twice_over),)


@breaks("fsdp/two-forwards", says="is wrong")
class TakesTheGradientOfOneForward(Swapped):
    """What an earlier run of the hook left is overwritten, and half of each gradient is lost."""

    swaps = (
        (
            gradients,
            "prepare_for_backward",
            lambda right: lambda handle: _and_halve(right, handle),
        ),
    )


def _and_halve(right: Any, handle: Any) -> None:
    right(handle)
    handle.flat_param.register_hook(lambda grad: grad / 2)


@breaks("fsdp/unused-unit", says="is wrong")
class UnusedUnitsKeepOldGradients(Swapped):
    """A unit that the backward does not reach has the gradient of an earlier one."""

    swaps = ((backward, "_finalize", lambda right: lambda s, h: _finalized(right, s, h)),)


def _finalized(right: Any, state: Any, handle: Any) -> None:
    right(state, handle)
    flat_param = handle.flat_param
    if flat_param.grad is None:
        flat_param.grad = getattr(handle, "old_grad", None)
    else:
        handle.old_grad = flat_param.grad.detach().clone()


@breaks("fsdp/dropped-low-precision-forward", says="is wrong|must match the size")
class DroppedForwardsTakeTheGradientWithThem(Swapped):
    """As torch 2.13 does."""

    swaps = ((gradients, "is_left_behind", always(False)),)


def _counted(right: Any) -> Any:
    def wrong(state: Any, output: Any) -> Any:
        if state.is_root and torch.is_grad_enabled():
            state.shared.forwards = getattr(state.shared, "forwards", 0) + 1
        return right(state, output)

    return wrong


def _mean_of_forwards(right: Any) -> Any:
    def wrong(state: Any, handle: Any, shard: torch.Tensor) -> None:
        state.device_handle.flush()
        right(state, handle, shard / state.shared.forwards)

    return wrong


def _from_0(right: Any) -> Any:
    def wrong(context: Any) -> None:
        right(context)
        context.forwards = 0

    return wrong


@breaks("fsdp/dropped-forward", says="is wrong")
class AveragesOverForwards(Swapped):
    """Whether they are in the loss or not."""

    swaps = (
        (forward, "post_forward", _counted),
        (reduction, "_finish", _mean_of_forwards),
        (backward, "_end_of_backward", _from_0),
    )


@breaks("fsdp/step-after-eval", says="is wrong")
class EvaluatesWithWhatWasGatheredBefore(Swapped):
    """As torch 2.13 does."""

    swaps = (
        (forward, "_free_all", nothing),
        (handle.FlatParamHandle, "mark_outdated", nothing),
    )


def _with_less(right: Any) -> Any:
    def wrong(handle: Any) -> bool:
        recomputing: bool = right(handle)
        if recomputing:
            handle.flat_param.data.mul_(0.5)
        return recomputing

    return wrong


@breaks("fsdp/recomputed-units", says="is wrong")
class RecomputesWithOtherParameters(Swapped):
    swaps = ((forward, "is_recomputing", _with_less),)


@breaks("fsdp/channels-last", says="is wrong|raised")
class ForgetsStrides(Swapped):
    """Parameters are flattened as they lie in memory, and viewed as if contiguous."""

    swaps = (
        (
            flat_param.FlatMetadata,
            "flatten_one",
            lambda _: (
                lambda self, i, tensor: tensor.permute(
                    *sorted(range(tensor.dim()), key=lambda d: -tensor.stride(d))
                ).reshape(-1)
            ),
        ),
        (flat_param, "_flat_stride", always(None)),
    )


@breaks("fsdp/process-group", says="raised|is wrong|waited|differ")
class IgnoresTheGroup(Swapped):
    swaps = (
        (
            collectives,
            "reduce_scatter",
            lambda _: (
                lambda device, shard, unsharded, group: shard.copy_(
                    unsharded.view(group.size(), -1)[group.rank()] * group.size()
                )
            ),
        ),
    )


@breaks("fsdp/forward-that-raises", says="Expects the handle training to be IDLE")
class StaysInTheForwardThatRaised(Swapped):
    """As torch 2.13 does."""

    swaps = ((forward, "abandon", nothing),)


@breaks("fsdp/freed-with-the-model", says="rank 0 still has a model nobody holds")
class HeldByAutograd(Swapped):
    """As torch 2.13 does."""

    swaps = ((backward, "_weakly", lambda _: functools.partial),)


@breaks("fsdp/hybrid-of-single-ranks", says="is wrong")
class ReplicasOfSingleRanksDrift(Swapped):
    """As torch 2.13 does."""

    swaps = (
        (
            state.FSDPState,
            "replica_group",
            lambda _: property(lambda self: self.process_group),
        ),
    )


@breaks("fsdp/no-sync", says="is wrong")
@breaks("fsdp/with-torch-no-sync", says="is wrong")
class NoSyncReducesAtOnceAndForgets(Swapped):
    """What accumulates under no_sync does not get into the reduction."""

    swaps = (
        (
            backward,
            "_reduce_or_keep",
            lambda right: (
                lambda state, handle: (
                    right(state, handle)
                    if state.sync_gradients
                    else setattr(handle.flat_param, "grad", None)
                )
            ),
        ),
    )


@breaks("fsdp/no-sync-original-parameters", says="is wrong|raised")
class NoSyncHidesWhatItKeeps(Swapped):
    """Original parameters do not show the gradient that no_sync keeps, so it looks cleared."""

    swaps = (
        (gradients, "show_unsharded_grads", nothing),
        (gradients, "show_grads", nothing),
    )


@breaks("fsdp/no-sync-hybrid", says="is wrong")
class TheFirstMicrobatchIsNotShared(Swapped):
    """With hybrid sharding, what there was before the last backward is not all-reduced again."""

    swaps = (
        (
            reduction,
            "_finish",
            lambda right: (
                lambda state, handle, shard: _first_of_own_node(right, state, handle, shard)
            ),
        ),
    )


def _first_of_own_node(right: Any, state: Any, handle: Any, shard: torch.Tensor) -> None:
    state.device_handle.flush()
    if handle.saved_grad_shard is None and state.inter_node_group is not None:
        shard.mul_(1 + 0.1 * state.inter_node_group.rank())
    right(state, handle, shard)


@breaks("fsdp/no-sync-then-unused", says="is wrong|must match the size")
class ForgetsWhatAnUnusedUnitAccumulated(Swapped):
    swaps = ((gradients, "is_left_behind", always(False)),)


@breaks("fsdp/one-element-accumulates", says="gradient: rank . is wrong|raised")
class TellsGradientsApartByTheirSizes(Swapped):
    """As torch 2.13 does."""

    swaps = (
        (
            gradients,
            "prepare_for_backward",
            lambda right: lambda handle: _by_size(right, handle),
        ),
    )


def _by_size(right: Any, handle: Any) -> None:
    grad = handle.flat_param.grad
    if grad is not None:
        handle.accumulates_unsharded = grad.numel() == handle.layout.numel
    right(handle)


@breaks("fsdp/optimizer-in-backward", says="parameters with gradients|is wrong")
class OptimizersInTheBackwardDoNotRun(Swapped):
    swaps = ((reduction, "_step_optimizers", nothing),)


@breaks("fsdp/silent-no-sync", says="under no_sync: reduce_scatter")
@breaks("fsdp/no-sync-of-inner-unit", says="was to raise")
class NoSyncIsIgnored(Swapped):
    swaps = (
        (
            api.FullyShardedDataParallel,
            "no_sync",
            lambda _: lambda self: contextlib.nullcontext(),
        ),
    )


@breaks("fsdp/whole-gradients-under-no-sync", says="elements of gradients")
class NoSyncShardsGradients(Swapped):
    swaps = (
        (
            api.FullyShardedDataParallel,
            "no_sync",
            lambda _: lambda self: contextlib.nullcontext(),
        ),
    )
