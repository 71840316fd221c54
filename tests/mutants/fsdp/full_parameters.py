"""Faults of FSDP's full parameters, its norms, and how much of a model a rank holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.distributed.fsdp import ShardingStrategy

from impl.fsdp import api
from impl.fsdp.build import construct as build
from impl.fsdp.checkpoint import state_dict
from impl.fsdp.flat_param import views
from impl.fsdp.step import backward, grad_norm, unshard_params
from impl.fsdp.step.lazy_init import lazy_init
from tests.mutants.fsdp.kit import Swapped, always, as_property, nothing
from tests.mutants.kit import breaks

# Full parameters


@breaks("fsdp/summon", says=r"got \['_fsdp_wrapped_module")
class SummonedHaveTheWrappersNames(Swapped):
    swaps = ((api.FullyShardedDataParallel, "_user_name", lambda _: lambda self, name: name),)


def _without_freeing(right: Any) -> Any:
    return lambda state, handle, free: right(state, handle, free=False)


@breaks("fsdp/summon-after-forward", says="is wrong")
class GoesOnWithWhatARankWrote(Swapped):
    """As torch 2.13 does."""

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


# Norms


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
    """As in torch 2.13."""

    swaps = ((grad_norm._Parameters, "norm_dtype", as_property(torch.float32)),)


# Memory


@breaks("fsdp/sharded-parameters", says=r"got Held\(params=284")
@breaks("fsdp/sharded-gradients", says="grads=284")
@breaks("fsdp/sharded-optimizer-state", says="state=284")
class EveryRankHoldsTheModel(Swapped):
    """All strategies are NO_SHARD."""

    swaps = ((build, "resolve_strategy", always(ShardingStrategy.NO_SHARD)),)


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
