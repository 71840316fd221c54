"""Randomly drawn models, wrapped and trained in any way, train under FSDP like the bare module."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from conformance import Chapter, Ranks, world_sizes
from conformance.spec.fsdp.models import Net
from conformance.spec.fsdp.training_runs import STRATEGIES, Recipe, check_training

chapter = Chapter("fsdp", source="torch 2.13 docs, FullyShardedDataParallel")


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    """Sizes that divide and that do not, ties, frozen parts, nesting, accumulation."""
    orig = draw(st.booleans())
    net = Net(
        width=draw(st.integers(1, 6)),
        hidden=draw(st.integers(1, 7)),
        blocks=draw(st.integers(1, 3)),
        vocabulary=draw(st.integers(2, 9)),
        tied=draw(st.booleans()),
        frozen=draw(st.sampled_from(["", "block", "parts"] if orig else ["", "block"])),
        nested=draw(st.booleans()),
    )
    return Recipe(
        net,
        strategy=draw(st.sampled_from(STRATEGIES)),
        orig=orig,
        # A parameter cannot be in two units, nor a frozen block share one with trained parameters.
        wrap=draw(st.sampled_from(["root", "blocks"] if orig or not net.frozen else ["blocks"])),
        steps=2,
        micro_batches=draw(st.integers(1, 2)),
        no_sync=draw(st.booleans()),
        forwards=draw(st.integers(1, 2)),
    )


@chapter.must(
    "fsdp/any-model",
    "With every model, wrapping, strategy and schedule of accumulation, training is the same as "
    "the bare module's.",
    rests_on="fsdp/full-shard",
)
@world_sizes(2, 3)
@given(recipe=recipes())
@settings(max_examples=25)
def test_any_training(ranks: Ranks, recipe: Recipe) -> None:
    check_training(ranks, recipe)
