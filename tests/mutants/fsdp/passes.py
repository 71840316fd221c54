"""Mutants of conformance/spec/fsdp/passes.py."""

from __future__ import annotations

from typing import Any

import torch

from impl.fsdp import collectives
from impl.fsdp.build import construct as build
from impl.fsdp.build import groups
from impl.fsdp.flat_param import gradients, handle, views
from impl.fsdp.step import backward, forward, reduction, state
from tests.mutants.fsdp.kit import Swapped, always, nothing
from tests.mutants.kit import breaks


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


def _finalized(right: Any, state: Any, handle: Any) -> None:
    right(state, handle)
    flat_param = handle.flat_param
    if flat_param.grad is None:
        flat_param.grad = getattr(handle, "old_grad", None)
    else:
        handle.old_grad = flat_param.grad.detach().clone()


@breaks("fsdp/unused-unit", says="is wrong")
class UnusedUnitsKeepOldGradients(Swapped):
    """A unit that the backward does not reach has the gradient of an earlier one."""

    swaps = ((backward, "_finalize", lambda right: lambda s, h: _finalized(right, s, h)),)


@breaks("fsdp/dropped-low-precision-forward", says="is wrong|must match the size")
class DroppedForwardsLoseGradients(Swapped):
    """A low-precision forward without a backward loses gradients, as in torch 2.13."""

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
    """Gradients are averaged over forwards, whether these are in the loss or not."""

    swaps = (
        (forward, "post_forward", _counted),
        (reduction, "_finish", _mean_of_forwards),
        (backward, "_end_of_backward", _from_0),
    )


def _but_frozen(right: Any) -> Any:
    def wrong(self: Any, *args: Any, **kwargs: Any) -> None:
        right(self, *args, **kwargs)
        if not any(param.requires_grad for param in self.params):
            self.hide()

    return wrong


@breaks("fsdp/dropped-forward-of-a-frozen-unit", says="want .*'between.weight', 'between.bias'")
class LosesSightOfFrozenParameters(Swapped):
    """A frozen unit has no parameters where they are wanted in full, as after a dropped forward
    with torch 2.13's NO_SHARD."""

    swaps = ((views.OrigParamViews, "show_unsharded_params", _but_frozen),)


@breaks("fsdp/step-after-eval", says="is wrong")
class EvaluatesWithOldParameters(Swapped):
    """A forward without gradients uses parameters that were gathered before the step, as in torch
    2.13."""

    swaps = (
        (forward, "_free_all", nothing),
        (handle.FlatParamHandle, "mark_outdated", nothing),
    )


def _with_less(right: Any) -> Any:
    def wrong(state: Any) -> bool:
        recomputing: bool = right(state)
        if recomputing and state.handle is not None:
            state.handle.flat_param.data.mul_(0.5)
        return recomputing

    return wrong


@breaks("fsdp/recomputed-units", says="is wrong")
class RecomputesWithOtherParameters(Swapped):
    swaps = ((forward, "is_recomputing", _with_less),)


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
    """After a forward that raised, the model is still in it, as in torch 2.13."""

    swaps = ((forward, "abandon", nothing),)


@breaks("fsdp/hybrid-of-single-ranks", says="is wrong")
class ReplicasOfSingleRanksDrift(Swapped):
    """Hybrid sharding over groups of one rank does not average gradients, as in torch 2.13."""

    swaps = (
        (
            state.FSDPState,
            "replica_group",
            lambda _: property(lambda self: self.process_group),
        ),
    )


@breaks("fsdp/optimizer-in-backward", says="parameters with gradients|is wrong")
class OptimizersInTheBackwardDoNotRun(Swapped):
    swaps = ((reduction, "_step_optimizers", nothing),)


def _of_the_first_alone(right: Any) -> Any:
    def wrong(device: Any, handle: Any) -> None:
        for param in handle.orig_views.params:
            del param._in_backward_optimizers[1:]
        right(device, handle)

    return wrong


@breaks("fsdp/optimizer-in-backward", says="is wrong")
class OnlyTheFirstOptimizerInTheBackwardSteps(Swapped):
    """Of several optimizers of a parameter only the first one steps."""

    swaps = ((reduction, "_step_optimizers", _of_the_first_alone),)


@breaks("fsdp/alone", says="strategy: rank . is wrong")
class ShardsOverOneRank(Swapped):
    swaps = ((build, "resolve_strategy", lambda _: lambda strategy, size: strategy),)


@breaks("fsdp/checkpointed", says="of shape|is wrong")
class RecomputesWithOtherTensors(Swapped):
    """With original parameters, the backward shows no tensors of the forward."""

    swaps = ((views.OrigParamViews, "show_backward_tensors", nothing),)


@breaks("fsdp/process-group", says="is wrong")
class ReplicasDivideByAllRanks(Swapped):
    """Gradients of a hybrid strategy are divided by the number of all ranks."""

    swaps = (
        (
            groups,
            "divide_factors",
            lambda right: lambda size: right(torch.distributed.get_world_size()),
        ),
    )
