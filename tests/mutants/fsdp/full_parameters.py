"""Mutants of conformance/spec/fsdp/full_parameters.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from impl.fsdp import api
from impl.fsdp.flat_param import gradients, handle
from impl.fsdp.flat_param import gradients as gradients_module
from impl.fsdp.phases import GradientEvent
from impl.fsdp.step import backward, grad_norm, reduction, unshard_params
from impl.fsdp.step.grad_norm import clip_grad_norm
from impl.fsdp.step.lazy_init import lazy_init
from tests.mutants.fsdp.kit import Swapped, always, as_property, nothing
from tests.mutants.kit import breaks


@breaks("fsdp/summon", says=r"got \['_fsdp_wrapped_module")
class SummonedHaveTheWrappersNames(Swapped):
    swaps = ((api.FullyShardedDataParallel, "_user_name", lambda _: lambda self, name: name),)


def _without_freeing(right: Any) -> Any:
    return lambda state, handle, free: right(state, handle, free=False)


@breaks("fsdp/summon-after-forward", says="is wrong")
class ComputesWithWhatARankWrote(Swapped):
    """Parameters that stay unsharded keep what a rank wrote into them, as in torch 2.13."""

    swaps = ((unshard_params, "reshard", _without_freeing),)


def _with_options(**changes: bool) -> Any:
    """The same context with other options than were asked for."""

    def make(right: Any) -> Any:
        def wrong(state: Any, options: Any, **kwargs: Any) -> Any:
            return right(state, replace(options, **changes), **kwargs)

        return wrong

    return make


@breaks("fsdp/summon-on-rank-0", says="parameters of 2 dimensions")
class EveryRankSeesParameters(Swapped):
    swaps = ((unshard_params, "unsharded", _with_options(rank0_only=False)),)


@breaks("fsdp/summon-one-unit", says="a block's weight has shape")
class SummonsAllBelow(Swapped):
    swaps = (
        (
            unshard_params,
            "summon",
            lambda right: (
                lambda module, recurse, options: right(module, recurse=True, options=options)
            ),
        ),
    )


@breaks("fsdp/summon-refuses", says="was to raise")
class SummonsWithAnyOptions(Swapped):
    swaps = ((unshard_params.SummonOptions, "validate", nothing),)


def _whatever_it_does(_: Any) -> Any:
    def wrong(state: Any, options: Any) -> Any:
        lazy_init(state)
        return unshard_params.unsharded(state, options)

    return wrong


@breaks("fsdp/summon-in-forward", says="Expects the handle training to be IDLE")
@breaks("fsdp/summon-twice", says="was to raise")
class SummonsWhateverTheUnitDoes(Swapped):
    swaps = ((unshard_params, "summon_one", _whatever_it_does),)


@breaks("fsdp/apply", says="is not filled with")
class ApplyLosesWhatItDid(Swapped):
    swaps = ((unshard_params, "summon_one", _with_options(writeback=False)),)


def _with_ones(right: Any) -> Any:
    def wrong(params: Any, norm_type: float, dtype: torch.dtype) -> Any:
        norm = right(params, norm_type, dtype)
        return torch.ones((), dtype=dtype) if norm is None and list(params) else norm

    return wrong


@breaks("fsdp/norm-without-gradients", says="norms: rank . is wrong")
class CountsGradientsThatAreNotThere(Swapped):
    """A rank without gradients has a norm of 1."""

    swaps = ((grad_norm, "_local_norm", _with_ones),)


@breaks("fsdp/norm-of-doubles", says="without narrowing")
class NormsAreInSinglePrecision(Swapped):
    """The norm of float64 gradients is computed in float32, as in torch 2.13."""

    swaps = ((grad_norm._Parameters, "norm_dtype", as_property(torch.float32)),)


@breaks("fsdp/norm-of-inner-unit", says="was to raise")
class ClipsFromInside(Swapped):
    swaps = (
        (
            api.FullyShardedDataParallel,
            "clip_grad_norm_",
            lambda _: (
                lambda self, max_norm, norm_type=2.0: clip_grad_norm(
                    self._state, max_norm, norm_type
                )
            ),
        ),
    )


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
    """The norm is that of the rank's own shard (RLinf#1558)."""

    swaps = ((dist, "all_reduce", nothing),)


def _over_all_ranks(right: Any) -> Any:
    def wrong(tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, **kwargs: Any) -> Any:
        return right(tensor, op=op, group=None if tensor.numel() == 1 else group, **kwargs)

    return wrong


@breaks("fsdp/norm-hybrid", says="is wrong")
class NormCountsReplicas(Swapped):
    """The norm counts each element once per replica (VeOmni#184)."""

    swaps = ((dist, "all_reduce", _over_all_ranks),)


@breaks("fsdp/norm-clips", says="norms before and after clipping")
class NormIsComputedAndNothingClipped(Swapped):
    swaps = ((torch, "clamp", always(torch.ones(()))),)


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


def _first_of_own_node(right: Any, state: Any, handle: Any, shard: torch.Tensor) -> None:
    state.device_handle.flush()
    if handle.saved_grad_shard is None and state.inter_node_group is not None:
        shard.mul_(1 + 0.1 * state.inter_node_group.rank())
    right(state, handle, shard)


@breaks("fsdp/no-sync-hybrid", says="is wrong")
class EarlierMicrobatchesAreNotAllReduced(Swapped):
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


@breaks("fsdp/no-sync-then-unused", says="is wrong|must match the size")
class ForgetsWhatAnUnusedUnitAccumulated(Swapped):
    swaps = ((gradients, "is_left_behind", always(False)),)


def _by_size(right: Any, handle: Any) -> None:
    grad = handle.flat_param.grad
    if grad is not None:
        is_whole = grad.numel() == handle.layout.numel
        event = GradientEvent.KEPT if is_whole else GradientEvent.DROPPED
        handle.gradient_progress.on(event)
    right(handle)


@breaks("fsdp/one-element-accumulates", says="gradient: rank . is wrong|raised")
class TellsGradientsApartByTheirSizes(Swapped):
    """Sharded and unsharded gradients are distinguished by their sizes, as in torch 2.13."""

    swaps = (
        (
            gradients,
            "prepare_for_backward",
            lambda right: lambda handle: _by_size(right, handle),
        ),
    )
