"""FSDP training compared with the bare module: each strategy, Adam, tied, frozen, nested units."""

from __future__ import annotations

import pytest

from conformance import Chapter, Ranks, covers, world_sizes
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

DOCS = "torch 2.13 docs, FullyShardedDataParallel"

chapter = Chapter("fsdp")


@chapter.must(
    "fsdp/losses",
    "Each rank's forward gives what the bare module gives for its batch, in every iteration.",
    source=f"{DOCS}: parameters are gathered in full for the forward",
)
@chapter.must(
    "fsdp/full-shard",
    "With FULL_SHARD, steps of an optimizer leave the parameters that training of the bare "
    "module on the mean of the ranks' losses leaves.",
    source=f"{DOCS}, sharding_strategy",
)
@world_sizes(1, 2, 3, 4, at_least=1)
@pytest.mark.parametrize("wrap", ["root", "blocks"])
def test_full_shard(ranks: Ranks, wrap: str) -> None:
    check_training(ranks, Recipe(wrap=wrap))


@chapter.must(
    "fsdp/shard-grad-op",
    "With SHARD_GRAD_OP, steps of an optimizer leave the bare module's parameters.",
    source=f"{DOCS}, sharding_strategy",
)
@covers("fsdp/losses")
@world_sizes(2, 3)
def test_shard_grad_op(ranks: Ranks) -> None:
    check_training(ranks, Recipe(strategy="SHARD_GRAD_OP"))


@chapter.must(
    "fsdp/no-shard",
    "With NO_SHARD, steps of an optimizer leave the bare module's parameters.",
    source=f"{DOCS}, sharding_strategy",
)
@covers("fsdp/losses")
@world_sizes(2, 3)
def test_no_shard(ranks: Ranks) -> None:
    check_training(ranks, Recipe(strategy="NO_SHARD"))


@chapter.must(
    "fsdp/original-parameters",
    "With use_orig_params=True every strategy trains like the bare module.",
    source=f"{DOCS}, use_orig_params",
)
@world_sizes(2, 3)
def test_original_parameters(ranks: Ranks) -> None:
    for strategy in STRATEGIES:
        check_training(ranks, Recipe(strategy=strategy, orig=True))


@chapter.must(
    "fsdp/hybrid-shard",
    "With HYBRID_SHARD, gradients are averaged over all ranks of both groups.",
    source=f"{DOCS}, sharding_strategy; pytorch#155903",
)
@world_sizes(4)
@pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig"])
def test_hybrid_shard(ranks: Ranks, orig: bool) -> None:
    recipe = Recipe(strategy=HYBRIDS[0], orig=orig)
    check_runs(ranks.run(train_in_halves, recipe), train_whole(recipe, 4))


@chapter.must(
    "fsdp/hybrid-shard-zero2",
    "With _HYBRID_SHARD_ZERO2, gradients are averaged over all ranks of both groups.",
    source="torch 2.13, ShardingStrategy; pytorch#155903",
)
@world_sizes(4)
@pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig"])
def test_hybrid_shard_zero2(ranks: Ranks, orig: bool) -> None:
    recipe = Recipe(strategy=HYBRIDS[1], orig=orig)
    check_runs(ranks.run(train_in_halves, recipe), train_whole(recipe, 4))


@chapter.must(
    "fsdp/adaptive-optimizer",
    "An optimizer with per-element state, such as Adam, steps on shards as it does on the bare "
    "module's parameters.",
    source=f"{DOCS}: the optimizer is made of the sharded parameters",
)
@world_sizes(2, 3)
@pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig"])
def test_adam(ranks: Ranks, orig: bool) -> None:
    check_training(ranks, Recipe(optimizer="adam", orig=orig), within=1e-6)


@chapter.must(
    "fsdp/uneven-sizes",
    "Parameters that the world size does not divide, and of fewer elements than ranks, train "
    "like the bare module's.",
    source="torch 2.13, FlatParamHandle: chunks are padded",
)
@world_sizes(2, 3, 5, at_least=2)
@pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig"])
def test_units_smaller_than_the_world(ranks: Ranks, orig: bool) -> None:
    """Layers of one to three elements, each a unit."""
    net = Net(width=1, hidden=1, blocks=1, vocabulary=2)
    check_training(ranks, Recipe(net=net, wrap="every", orig=orig))


@chapter.must(
    "fsdp/tied-weights",
    "A weight with two names in one unit is one parameter: every element of it is updated on "
    "every world size.",
    source="pytorch#176076",
)
@world_sizes(2, 3, 4, at_least=2)
@pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig"])
def test_tied_weights(ranks: Ranks, orig: bool) -> None:
    check_training(ranks, Recipe(net=Net(tied=True, blocks=1), orig=orig))


@chapter.must(
    "fsdp/frozen-unit",
    "A unit of frozen parameters does not change them, and gradients flow through it.",
    source="torch 2.13, _register_post_backward_reshard_only_hook",
)
@world_sizes(2)
@pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig"])
def test_a_frozen_block(ranks: Ranks, orig: bool) -> None:
    for strategy in STRATEGIES:
        check_training(ranks, Recipe(net=Net(frozen="block"), strategy=strategy, orig=orig))


@chapter.must(
    "fsdp/frozen-parts",
    "With use_orig_params=True, a unit may hold both frozen and trained parameters: the frozen "
    "ones keep their values.",
    source=f"{DOCS}, use_orig_params",
)
@world_sizes(2, 3)
def test_frozen_parts_of_units(ranks: Ranks) -> None:
    for strategy in STRATEGIES:
        check_training(ranks, Recipe(net=Net(frozen="parts"), strategy=strategy, orig=True))


@chapter.must(
    "fsdp/nested-units",
    "Units within units train like the bare module.",
    source=f"{DOCS}, auto_wrap_policy",
)
@world_sizes(2, 3)
def test_blocks_in_blocks(ranks: Ranks) -> None:
    for strategy in STRATEGIES:
        check_training(ranks, Recipe(net=Net(nested=True, blocks=1), strategy=strategy))


@chapter.must(
    "fsdp/accumulates",
    "Gradients of several backward passes add up until they are cleared.",
    source="torch 2.13, _accumulate_sharded_grad",
)
@world_sizes(2, 3)
@pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig"])
def test_two_backwards_before_a_step(ranks: Ranks, orig: bool) -> None:
    for strategy in STRATEGIES:
        check_training(ranks, Recipe(strategy=strategy, orig=orig, micro_batches=2))


@chapter.must(
    "fsdp/two-forwards",
    "Two forward passes before one backward give the gradients of both.",
    source="torch 2.13, _post_backward_hook; fairscale#513",
)
@world_sizes(2)
@pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig"])
def test_two_forwards_before_a_backward(ranks: Ranks, orig: bool) -> None:
    for strategy in STRATEGIES:
        check_training(ranks, Recipe(strategy=strategy, orig=orig, forwards=2))
