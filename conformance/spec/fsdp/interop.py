"""Ranks that run torch's FSDP and ranks that run the target's, in one job."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import MixedPrecision

from conformance import Chapter, Me, Ranks, assert_same_on_all_ranks, world_sizes
from conformance.spec.fsdp.models import Net
from conformance.spec.fsdp.training_runs import (
    HYBRIDS,
    STRATEGIES,
    Recipe,
    Run,
    check_runs,
    halves,
    train,
    train_whole,
)

chapter = Chapter("fsdp", source="derived")


def train_mixed(me: Me, recipe: Recipe, turn: int, hybrid: bool = False) -> Run:
    """Every second rank uses torch's FSDP, from the rank `turn` on; with -1 all of them do."""
    cls = TorchFSDP if turn < 0 or me.rank % 2 == turn else None
    kwargs = {"process_group": halves(me)} if hybrid else {}
    return train(me, recipe, cls=cls, **kwargs)


@chapter.must(
    "fsdp/with-torch",
    "Ranks with torch's FSDP and ranks with the target's train together in one job, with every "
    "sharding strategy.",
    source="derived: layouts and collectives agree",
    rests_on="fsdp/trace-full-shard",
)
@world_sizes(2, 3)
def test_every_strategy(ranks: Ranks) -> None:
    for strategy in STRATEGIES:
        recipe = Recipe(strategy=strategy)
        want = train_whole(recipe, ranks.world_size)
        for turn in range(2):
            check_runs(ranks.run(train_mixed, recipe, turn), want)


@chapter.must(
    "fsdp/with-torch-original-parameters",
    "Ranks with torch's FSDP and with the target's train together with use_orig_params=True.",
    source="derived: alignment agrees",
    rests_on="fsdp/trace-full-shard",
)
@world_sizes(2, 3)
def test_original_parameters(ranks: Ranks) -> None:
    for strategy in STRATEGIES:
        recipe = Recipe(strategy=strategy, orig=True)
        want = train_whole(recipe, ranks.world_size)
        check_runs(ranks.run(train_mixed, recipe, 1), want)


@chapter.must(
    "fsdp/with-torch-no-sync",
    "Ranks with torch's FSDP and with the target's accumulate together under no_sync.",
    rests_on="fsdp/trace-full-shard",
)
@world_sizes(2)
def test_accumulation(ranks: Ranks) -> None:
    for strategy in STRATEGIES:
        recipe = Recipe(strategy=strategy, micro_batches=2, no_sync=True)
        want = train_whole(recipe, ranks.world_size)
        check_runs(ranks.run(train_mixed, recipe, 0), want)


@chapter.must(
    "fsdp/with-torch-hybrid",
    "Ranks with torch's FSDP and with the target's share hybrid sharding.",
    rests_on="fsdp/trace-hybrid-shard",
)
@world_sizes(4)
def test_hybrid_sharding(ranks: Ranks) -> None:
    for strategy in HYBRIDS:
        recipe = Recipe(strategy=strategy)
        want = train_whole(recipe, ranks.world_size)
        check_runs(ranks.run(train_mixed, recipe, 1, True), want)


@chapter.must(
    "fsdp/with-torch-low-precision",
    "Ranks with torch's FSDP and with the target's train together in mixed precision, with the "
    "same bits as torch alone.",
    rests_on="fsdp/trace-full-shard",
)
@world_sizes(2)
def test_low_precision(ranks: Ranks) -> None:
    """Two ranks' sums do not depend on their order."""
    precision = MixedPrecision(torch.bfloat16, torch.float32)
    recipe = Recipe(net=Net(dtype="float32"), kwargs={"mixed_precision": precision})
    want = ranks.run(train_mixed, recipe, -1)
    for turn in range(2):
        got = ranks.run(train_mixed, recipe, turn)
        assert_same_on_all_ranks([run.params for run in got], want[0].params)
