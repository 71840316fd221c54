"""Mutants of conformance/spec/fsdp/full_parameters.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from impl.fsdp import api
from impl.fsdp.flat_param import gradients, handle
from impl.fsdp.step import unshard_params
from impl.fsdp.step.lazy_init import lazy_init
from tests.mutants.fsdp.kit import Swapped, nothing
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
    swaps = ((gradients, "write_back_grad", nothing),)


def _gradients_kept(right: Any) -> Any:
    def wrong(state: Any, options: Any) -> Any:
        kept = options.writeback or options.with_grads
        return right(state, replace(options, writeback=kept))

    return wrong


@breaks("fsdp/summon-gradients", says=r"\d+ of \d+ have changed")
class GradientsAreWrittenBackAnyway(Swapped):
    swaps = ((unshard_params, "unsharded", _gradients_kept),)


@breaks("fsdp/summon-gradients", says="after zero_grad, gradients of")
class ClearedGradientsAreShown(Swapped):
    swaps = ((gradients, "reset_if_cleared", nothing),)


@breaks("fsdp/apply", says="_is_root|raised")
class ApplyMakesARoot(Swapped):
    """A unit that has run apply before there was a root stays a root itself."""

    swaps = ((api, "reset_lazy_init", nothing),)
