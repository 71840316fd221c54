"""Training step by step, beside the bare module's."""

from __future__ import annotations

import pytest

from conformance import Ranks, covers, world_sizes
from conformance.spec.fsdp.models import Net
from conformance.spec.fsdp.training_runs import (
    HYBRIDS,
    STRATEGIES,
    Recipe,
    check_runs,
    check_training,
    train_in_halves,
    train_whole,
)


@covers("fsdp/losses", "fsdp/full-shard")
@world_sizes(1, 2, 3, 4, at_least=1)
@pytest.mark.parametrize("wrap", ["root", "blocks"])
def test_full_shard(ranks: Ranks, wrap: str) -> None:
    check_training(ranks, Recipe(wrap=wrap))


@covers("fsdp/losses", "fsdp/shard-grad-op")
@world_sizes(2, 3)
def test_shard_grad_op(ranks: Ranks) -> None:
    check_training(ranks, Recipe(strategy="SHARD_GRAD_OP"))


@covers("fsdp/losses", "fsdp/no-shard")
@world_sizes(2, 3)
def test_no_shard(ranks: Ranks) -> None:
    check_training(ranks, Recipe(strategy="NO_SHARD"))


@covers("fsdp/original-parameters")
@world_sizes(2, 3)
def test_original_parameters(ranks: Ranks) -> None:
    for strategy in STRATEGIES:
        check_training(ranks, Recipe(strategy=strategy, orig=True))


@covers("fsdp/hybrid-shard")
@world_sizes(4)
@pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig"])
def test_hybrid_shard(ranks: Ranks, orig: bool) -> None:
    recipe = Recipe(strategy=HYBRIDS[0], orig=orig)
    check_runs(ranks.run(train_in_halves, recipe), train_whole(recipe, 4))


@covers("fsdp/hybrid-shard-zero2")
@world_sizes(4)
@pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig"])
def test_hybrid_shard_zero2(ranks: Ranks, orig: bool) -> None:
    recipe = Recipe(strategy=HYBRIDS[1], orig=orig)
    check_runs(ranks.run(train_in_halves, recipe), train_whole(recipe, 4))


@covers("fsdp/adaptive-optimizer")
@world_sizes(2, 3)
@pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig"])
def test_adam(ranks: Ranks, orig: bool) -> None:
    check_training(ranks, Recipe(optimizer="adam", orig=orig), within=1e-6)


@covers("fsdp/uneven-sizes")
@world_sizes(2, 3, 4, at_least=2)
@pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig"])
def test_units_smaller_than_the_world(ranks: Ranks, orig: bool) -> None:
    """Layers of one to three elements, each a unit."""
    net = Net(width=1, hidden=1, blocks=1, vocabulary=2)
    check_training(ranks, Recipe(net=net, wrap="every", orig=orig))


@covers("fsdp/tied-weights")
@world_sizes(2, 3, 4, at_least=2)
@pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig"])
def test_tied_weights(ranks: Ranks, orig: bool) -> None:
    check_training(ranks, Recipe(net=Net(tied=True, blocks=1), orig=orig))


@covers("fsdp/frozen-unit")
@world_sizes(2)
@pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig"])
def test_a_frozen_block(ranks: Ranks, orig: bool) -> None:
    for strategy in STRATEGIES:
        check_training(ranks, Recipe(net=Net(frozen="block"), strategy=strategy, orig=orig))


@covers("fsdp/frozen-parts")
@world_sizes(2, 3)
def test_frozen_parts_of_units(ranks: Ranks) -> None:
    for strategy in STRATEGIES:
        check_training(ranks, Recipe(net=Net(frozen="parts"), strategy=strategy, orig=True))


@covers("fsdp/nested-units")
@world_sizes(2, 3)
def test_blocks_in_blocks(ranks: Ranks) -> None:
    for strategy in STRATEGIES:
        check_training(ranks, Recipe(net=Net(nested=True, blocks=1), strategy=strategy))


@covers("fsdp/accumulates")
@world_sizes(2, 3)
@pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig"])
def test_two_backwards_before_a_step(ranks: Ranks, orig: bool) -> None:
    for strategy in STRATEGIES:
        check_training(ranks, Recipe(strategy=strategy, orig=orig, micro_batches=2))


@covers("fsdp/two-forwards")
@world_sizes(2)
@pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig"])
def test_two_forwards_before_a_backward(ranks: Ranks, orig: bool) -> None:
    for strategy in STRATEGIES:
        check_training(ranks, Recipe(strategy=strategy, orig=orig, forwards=2))
