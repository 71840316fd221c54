"""Random networks with activation checkpoints around any parts, trained under DDP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from conformance import Chapter, Ranks, world_sizes
from conformance.spec.checkpointing.networks import NON_REENTRANT, REENTRANT, Path, Recipe
from conformance.spec.checkpointing.training import train_and_compare

chapter = Chapter(
    "checkpointing",
    source="torch 2.13 docs, torch.utils.checkpoint; torch, test_c10d_common.py",
    needs="device:autocast",
)


_caps = st.sampled_from([0.00001, 0.0001, 0.0002, 25])


@dataclass(frozen=True, slots=True)
class Problem:
    """A network and how it is wrapped, as plain data."""

    recipe: Recipe
    how: str
    options: tuple[tuple[str, Any], ...]


def grouped(layers: list[int]) -> st.SearchStrategy[Path]:
    """These layers in this order, with checkpoints around some, one within another too."""

    @st.composite
    def cut(draw: st.DrawFn, low: int, high: int, depth: int) -> Path:
        parts: list[Any] = []
        while low < high:
            end = draw(st.integers(low + 1, high))
            if depth < 3 and draw(st.booleans()):
                parts.append(draw(cut(low, end, depth + 1)))
            else:
                parts += layers[low:end]
            low = end
        return tuple(parts)

    return cut(0, len(layers), 0)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """What must work: see the requirements of this profile for what need not."""
    count = draw(st.integers(1, 4))
    how = draw(st.sampled_from([REENTRANT, NON_REENTRANT]))
    static = draw(st.booleans())
    if static or how == NON_REENTRANT:
        layers = draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=5))
        tied = draw(st.booleans())
    else:
        layers = draw(st.permutations(range(count)))
        tied = False
    options: dict[str, Any] = {
        "static_graph": static,
        "gradient_as_bucket_view": draw(st.booleans()),
        "find_unused_parameters": how == NON_REENTRANT and len(set(layers)) < count,
        "bucket_cap_mb": draw(_caps),
    }
    recipe = Recipe((draw(grouped(list(layers))),), count, tied)
    return Problem(recipe, how, tuple(options.items()))


@chapter.must(
    "checkpointing/any-parts",
    "Training is the same as without checkpoints, whichever parts of a network are checkpointed, "
    "nested ones included, and whichever buckets the gradients are in.",
    rests_on=("checkpointing/every-layer", "checkpointing/twice"),
)
@world_sizes(2, 3)
@given(problem=problems())
@settings(max_examples=20)
def test_any_parts_in_any_checkpoints(ranks: Ranks, problem: Problem) -> None:
    train_and_compare(ranks, problem.recipe, problem.how, [dict(problem.options)])
