"""Layers that run once in a forward pass, and once more in backward."""

from __future__ import annotations

import pytest

from conformance import Ranks, covers, world_sizes
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


def works_with(how: str) -> list[Options]:
    """Options with which each kind of checkpoint works around layers that run once."""
    return [*VIEWS, *STATIC] if how == REENTRANT else [*EVERY]


@covers("checkpointing/once")
@world_sizes(1, 2, 3)
@both_kinds
def test_one_of_two_layers(ranks: Ranks, how: str) -> None:
    train_and_compare(ranks, ONCE, how, works_with(how), steps=5)


@covers("checkpointing/every-layer")
@world_sizes(2, 3)
@both_kinds
def test_both_layers(ranks: Ranks, how: str) -> None:
    train_and_compare(ranks, EVERY_LAYER, how, works_with(how))


@covers("checkpointing/whole-module")
@world_sizes(2)
@both_kinds
def test_all_layers_in_one(ranks: Ranks, how: str) -> None:
    train_and_compare(ranks, WHOLE, how, works_with(how))


@covers("checkpointing/nested")
@world_sizes(2)
@both_kinds
def test_one_within_another(ranks: Ranks, how: str) -> None:
    train_and_compare(ranks, NESTED, how, works_with(how))


@covers("checkpointing/around-the-wrapper")
@world_sizes(2, 3)
@both_kinds
def test_the_wrapper_itself_runs_again(ranks: Ranks, how: str) -> None:
    train_and_compare(ranks, PLAIN, how, EVERY, around=True)


@covers("checkpointing/around-shared-weights")
@world_sizes(2)
@both_kinds
def test_the_wrapper_around_shared_weights_runs_again(ranks: Ranks, how: str) -> None:
    train_and_compare(ranks, PLAIN_TIED, how, VIEWS_AND_GRAPHS, around=True)


@covers("checkpointing/in-segments")
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


@covers("checkpointing/frozen-layer")
@world_sizes(2)
@both_kinds
@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_layer(ranks: Ranks, how: str, frozen: int) -> None:
    train_and_compare(
        ranks, Recipe((((0, 1), (2,)),), count=3, frozen=(frozen,)), how, works_with(how)[:4]
    )


@covers("checkpointing/unused-parameters")
@world_sizes(2, 3)
def test_parameters_that_nobody_uses(ranks: Ranks) -> None:
    train_and_compare(ranks, UNUSED, NON_REENTRANT, [*SEARCHING, *STATIC])


@covers("checkpointing/unused-parameters-static")
@world_sizes(2)
def test_parameters_that_nobody_uses_in_a_static_graph(ranks: Ranks) -> None:
    train_and_compare(ranks, UNUSED, REENTRANT, STATIC)
