"""Activation checkpoints in and around DDP, each layer in one: nested, frozen, unused, segments."""

from __future__ import annotations

import pytest

from conformance import Chapter, Ranks, world_sizes
from conformance.spec.checkpointing.networks import (
    EVERY_LAYER,
    NESTED,
    NON_REENTRANT,
    ONCE,
    PLAIN,
    PLAIN_TIED,
    REENTRANT,
    UNUSED,
    WHOLE,
    Path,
    Recipe,
    both_kinds,
)
from conformance.spec.checkpointing.training import (
    EVERY,
    SEARCHING,
    STATIC,
    VIEWS,
    VIEWS_AND_GRAPHS,
    Options,
    train_and_compare,
)

SUITE = "torch, test_c10d_common.py"
CHECKPOINT = "torch 2.13 docs, torch.utils.checkpoint"

chapter = Chapter("checkpointing", needs="device:autocast")


def works_with(how: str) -> list[Options]:
    """Options with which each kind of checkpoint works around layers that run once."""
    return [*VIEWS, *STATIC] if how == REENTRANT else [*EVERY]


@chapter.must(
    "checkpointing/once",
    "With a layer in a checkpoint, reentrant or not, training is the same as in one process that "
    "keeps all activations, with or without a static graph, and whether or not gradients are "
    "views of buckets.",
    source=f"{SUITE}, test_ddp_checkpointing_once",
    rests_on="ddp/average",
)
@world_sizes(1, 2, 3)
@both_kinds
def test_one_of_two_layers(ranks: Ranks, how: str) -> None:
    train_and_compare(ranks, ONCE, how, works_with(how), steps=5)


@chapter.must(
    "checkpointing/every-layer",
    "With several layers in a checkpoint each, training is the same as in one process that keeps "
    "all activations; no gradient is left out of the exchange.",
    source="pytorch#109191",
    rests_on="checkpointing/once",
)
@world_sizes(2, 3)
@both_kinds
def test_both_layers(ranks: Ranks, how: str) -> None:
    train_and_compare(ranks, EVERY_LAYER, how, works_with(how))


@chapter.must(
    "checkpointing/whole-module",
    "All of a module's layers may be in one checkpoint inside the wrapper.",
    source=CHECKPOINT,
    rests_on="checkpointing/once",
)
@world_sizes(2)
@both_kinds
def test_all_layers_in_one(ranks: Ranks, how: str) -> None:
    train_and_compare(ranks, WHOLE, how, works_with(how))


@chapter.must(
    "checkpointing/nested",
    "A checkpoint may contain others.",
    source=f"{CHECKPOINT}: use_reentrant=False 'supports nested checkpointing'; observed for both",
    rests_on="checkpointing/once",
)
@world_sizes(2)
@both_kinds
def test_one_within_another(ranks: Ranks, how: str) -> None:
    train_and_compare(ranks, NESTED, how, works_with(how))


@chapter.must(
    "checkpointing/around-the-wrapper",
    "A checkpoint may be around the wrapper, whose forward then runs again in backward, whatever "
    "the options of the wrapper.",
    source=f"{SUITE}, run_checkpoint",
    rests_on="checkpointing/once",
)
@world_sizes(2, 3)
@both_kinds
def test_the_wrapper_itself_runs_again(ranks: Ranks, how: str) -> None:
    train_and_compare(ranks, PLAIN, how, EVERY, around=True)


@chapter.must(
    "checkpointing/around-shared-weights",
    "A checkpoint may be around the wrapper of a module whose layers share a weight.",
    source=f"{SUITE}, test_ddp_checkpointing_weight_sharing",
    rests_on="checkpointing/around-the-wrapper",
)
@world_sizes(2)
@both_kinds
def test_the_wrapper_around_shared_weights_runs_again(ranks: Ranks, how: str) -> None:
    train_and_compare(ranks, PLAIN_TIED, how, VIEWS_AND_GRAPHS, around=True)


@chapter.must(
    "checkpointing/in-segments",
    "A sequence of layers may run in segments, all but the last of which are checkpoints.",
    source="torch 2.13 docs, checkpoint_sequential",
    rests_on="checkpointing/every-layer",
)
@world_sizes(2)
@both_kinds
@pytest.mark.parametrize("segments", [2, 3])
def test_a_sequence_in_segments(ranks: Ranks, how: str, segments: int) -> None:
    """As checkpoint_sequential does it: all segments but the last one are checkpoints."""
    numbers = list(range(6))
    size = len(numbers) // segments
    parts = [tuple(numbers[i : i + size]) for i in range(0, len(numbers), size)]
    path: Path = (*parts[:-1], *parts[-1])
    train_and_compare(ranks, Recipe((path,), count=6), how, works_with(how)[:4])


@chapter.must(
    "checkpointing/frozen-layer",
    "A layer that requires no gradient gets none in a checkpoint either, and the layers beside "
    "it in the checkpoint get theirs.",
    source="torch 2.13, requires_grad",
    rests_on="checkpointing/once",
)
@world_sizes(2)
@both_kinds
@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_layer(ranks: Ranks, how: str, frozen: int) -> None:
    train_and_compare(
        ranks, Recipe((((0, 1), (2,)),), count=3, frozen=(frozen,)), how, works_with(how)[:4]
    )


@chapter.must(
    "checkpointing/unused-parameters",
    "With non-reentrant checkpoints the search for unused parameters sees into them: used "
    "parameters are averaged, and those that no rank uses have no gradient.",
    source=f"{SUITE}, test_ddp_checkpointing_unused_params",
    rests_on="checkpointing/once",
)
@world_sizes(2, 3)
def test_parameters_that_nobody_uses(ranks: Ranks) -> None:
    train_and_compare(ranks, UNUSED, NON_REENTRANT, [*SEARCHING, *STATIC])


@chapter.must(
    "checkpointing/unused-parameters-static",
    "With reentrant checkpoints, a static graph handles unused parameters, with or without "
    "find_unused_parameters.",
    source=f"{SUITE}, test_ddp_checkpointing_unused_params",
    rests_on="checkpointing/once",
)
@world_sizes(2)
def test_parameters_that_nobody_uses_in_a_static_graph(ranks: Ranks) -> None:
    train_and_compare(ranks, UNUSED, REENTRANT, STATIC)
