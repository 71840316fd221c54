"""Mutants of conformance/spec/fsdp/no_sync.py."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from impl.fsdp.flat_param import gradients
from impl.fsdp.phases import GradientEvent
from impl.fsdp.step import backward, reduction, unshard_params
from tests.mutants.fsdp.kit import Swapped, always, nothing
from tests.mutants.kit import breaks


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


def _forgetting_what_is_put_aside(right: Any) -> Any:
    def wrong(handle: Any) -> None:
        handle.saved_grad_shard = None
        right(handle)

    return wrong


@breaks("fsdp/no-sync-after-a-reduction", says="is wrong")
class NoSyncForgetsWhatIsReduced(Swapped):
    """A backward under no_sync drops the gradients that were reduced before it."""

    swaps = ((gradients, "show_kept_grads", _forgetting_what_is_put_aside),)


def _dropping_what_is_kept(right: Any) -> Any:
    @contextlib.contextmanager
    def wrong(state: Any, options: Any) -> Iterator[None]:
        if state.handle is not None and gradients.has_unsharded_grad(state.handle):
            gradients.drop(state.handle)
        with right(state, options):
            yield

    return wrong


@breaks("fsdp/no-sync-and-full-parameters", says="is wrong")
class ShowingParametersDropsGradients(Swapped):
    """Gradients that no_sync keeps are dropped when full parameters are shown."""

    swaps = ((unshard_params, "unsharded", _dropping_what_is_kept),)


def _first_of_own_node(right: Any, state: Any, handle: Any, shard: torch.Tensor) -> None:
    state.device_handle.flush()
    if handle.saved_grad_shard is None and state.inter_node_group is not None:
        shard.mul_(1 + 0.1 * state.inter_node_group.rank())
    right(state, handle, shard)


@breaks("fsdp/no-sync-after-thawing", says=r"0\.weight: rank 0 is wrong")
class WhatThawedCountsAsCleared(Swapped):
    """A parameter that was frozen shows no gradient under no_sync with NO_SHARD, so the next
    forward takes it for cleared, as in torch 2.13."""

    swaps = ((gradients, "show_kept_grads", lambda _: gradients.show_unsharded_grads),)


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
