"""Mutants of conformance/spec/fsdp/exceptions.py."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from impl.fsdp import api
from impl.fsdp.checkpoint import state_dict
from impl.fsdp.step import backward, lazy_init, unshard_params
from tests.mutants.fsdp.kit import Swapped
from tests.mutants.kit import breaks


def _without_finally(right: Any) -> Any:
    @contextlib.contextmanager
    def wrong(model: Any) -> Iterator[None]:
        context = right(model)
        context.__enter__()
        model._state.not_left = context  # or it would be left when it is collected
        yield
        context.__exit__(None, None, None)

    return wrong


def _summoned_without_finally(right: Any) -> Any:
    @contextlib.contextmanager
    def wrong(state: Any, options: Any) -> Iterator[None]:
        context = right(state, options)
        context.__enter__()
        state.not_left = context  # or it would be left when it is collected
        yield
        context.__exit__(None, None, None)

    return wrong


@breaks("fsdp/no-sync-after-error", says="is wrong|raised")
class AnErrorMakesNoSyncLastForEver(Swapped):
    """no_sync stays on after an exception: there is no finally clause."""

    swaps = ((api.FullyShardedDataParallel, "no_sync", _without_finally),)


@breaks("fsdp/summon-after-error", says="raised")
class AnErrorLeavesParametersSummoned(Swapped):
    """Parameters stay summoned after an exception: there is no finally clause."""

    swaps = ((unshard_params, "summon_one", _summoned_without_finally),)


def _lazily(_: Any) -> Any:
    return lazy_init.lazy_init


@breaks("fsdp/backward-that-raises", says="raised|is wrong")
class StaysInTheBackwardThatRaised(Swapped):
    """After a backward that raised, the model is still in it, as in torch 2.13."""

    swaps = (
        (api, "ensure_ready", _lazily),
        (backward, "ensure_ready", _lazily),
        (unshard_params, "ensure_ready", _lazily),
        (state_dict, "ensure_ready", _lazily),
    )
