"""Ranks with torch's DDP and ranks with the target's in one job."""

from __future__ import annotations

import pytest

from conformance import Chapter, Ranks, covers, world_sizes
from conformance.spec.ddp.models import (
    WIDTH,
    Branching,
    Convolving,
    InSequence,
    Perceptron,
    Recipe,
    Typed,
    normal,
)
from conformance.spec.ddp.training_runs import Options, batches, train

chapter = Chapter(
    "ddp", source="torch's collectives, their order, dtypes and sizes are the interface"
)


SMALL = 2**-20  # of a MiB: one byte


@chapter.must(
    "ddp/interop",
    "Ranks that run torch's DDP and ranks that run the target's train one model together.",
    rests_on="ddp/whole-batch",
)
@world_sizes(2, 3)
@pytest.mark.parametrize("first", ["target", "torch"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bucket_cap_mb": 40 * SMALL, "gradient_as_bucket_view": True},
        {"static_graph": True},
        {"find_unused_parameters": True},
    ],
    ids=lambda options: "-".join(options) or "default",
)
def test_torch_and_the_target_train_together(ranks: Ranks, first: str, options: Options) -> None:
    others = {"target": "torch", "torch": "target"}
    implementations = [first, others[first], first][: ranks.world_size]
    steps = batches(ranks.world_size, 3, (2, WIDTH))
    recipe = Recipe(Perceptron, ((WIDTH, 5, 4, 2),))
    train(ranks, recipe, steps, options, implementations=implementations)


@covers("ddp/interop")
@world_sizes(2)
@pytest.mark.parametrize("first", ["target", "torch"])
def test_torch_and_the_target_leave_out_different_parameters(ranks: Ranks, first: str) -> None:
    uses = [[[0], [0, 2]], [[2], [1]], [[0, 1, 2], [2]]]
    steps = [
        [(normal((2, WIDTH), i + r), used) for r, used in enumerate(step)]
        for i, step in enumerate(uses)
    ]
    order = ["target", "torch"] if first == "target" else ["torch", "target"]
    options = {"find_unused_parameters": True, "bucket_cap_mb": SMALL}
    train(ranks, Recipe(Branching), steps, options, implementations=order)


@covers("ddp/interop")
@world_sizes(2)
def test_torch_and_the_target_agree_on_rank_0s_order(ranks: Ranks) -> None:
    steps = [
        [(normal((2, WIDTH), i + r), [0, 1, 2] if r else [2, 1, 0]) for r in range(2)]
        for i in range(3)
    ]
    for order in (["target", "torch"], ["torch", "target"]):
        train(ranks, Recipe(InSequence), steps, {"bucket_cap_mb": SMALL}, implementations=order)


@covers("ddp/interop")
@world_sizes(2)
@pytest.mark.parametrize("dtype", ["complex64", "float16", "channels_last"])
def test_torch_and_the_target_share_unusual_parameters(ranks: Ranks, dtype: str) -> None:
    if dtype == "channels_last":
        recipe, shape = Recipe(Convolving), [2, 2, 4, 4]
    else:
        kinds = [((2, 3), dtype), ((3,), "float32"), ((2,), dtype)]
        recipe, shape = Recipe(Typed, (kinds, [0, 1, 2])), [2, WIDTH]
    for order in (["target", "torch"], ["torch", "target"]):
        train(ranks, recipe, batches(2, 2, shape), within=0.05, implementations=order)
