"""DDP in programs of their own, with nothing in common but the group."""

from __future__ import annotations

from typing import Any

from conformance import Chapter, Me, Ranks, deadline, not_probed, world_sizes
from conformance.oracle.training import Step, train_whole
from conformance.spec.ddp.models import WIDTH, Branching, Perceptron, Recipe, loss_of
from conformance.spec.ddp.training_runs import assert_trained, batches, mine, take_steps
from conformance.spec.separate_programs import LIMIT_S, run_in_programs

chapter = Chapter("ddp", needs="dtype:float64")

_BYTE = 1 / 2**20  # of bucket_cap_mb: a bucket for each gradient


def _steps(recipe: Recipe, world_size: int) -> Any:
    """[step][rank] -> arguments; each rank uses other branches."""
    steps = batches(world_size, 3, (2, WIDTH))
    if recipe.make is Perceptron:
        return steps
    return [[(x, [rank, 2]) for rank, (x,) in enumerate(step)] for step in steps]


# Models, and whether they have parameters that a rank does not use.
_TRAINED = ((Recipe(Perceptron, ((WIDTH, 8, 5, 2),)), False), (Recipe(Branching), True))


def train_each(me: Me) -> list[list[Step]]:
    return [
        take_steps(
            me,
            recipe,
            {"bucket_cap_mb": _BYTE, "find_unused_parameters": has_unused},
            mine(_steps(recipe, me.world_size), me.rank),
        )
        for recipe, has_unused in _TRAINED
    ]


@chapter.must(
    "ddp/separate-programs",
    "DDP trains ranks that were started as programs of their own, as torchrun starts them, "
    "like forks of one process: nothing depends on the order of a set, which differs there.",
    source="Megatron-LM#2218 and transformers#48162",
    rests_on="ddp/average",
)
@not_probed()
@world_sizes(2)
@deadline(LIMIT_S + 30)
def test_programs_train(bare_ranks: Ranks) -> None:
    got = run_in_programs(bare_ranks, train_each)
    for (recipe, _), runs in zip(_TRAINED, zip(*got, strict=True), strict=True):
        assert_trained(runs, train_whole(recipe(), _steps(recipe, len(runs)), loss_of))
