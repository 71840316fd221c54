"""Training under fully_shard compared with the bare module's on all batches, in one process."""

from __future__ import annotations

import pytest
from torch.distributed.fsdp import fully_shard as torchs

from conformance import Chapter, Me, Ranks, world_sizes
from conformance.spec.facts import rows
from conformance.spec.fsdp.models import Net
from conformance.spec.fully_shard.recipes import (
    Recipe,
    Run,
    check_runs,
    check_training,
    sharded,
    train,
    train_whole,
)

DOCS = "torch 2.13 docs, fully_shard"
NEEDS = ("op:all_gather_into_tensor", "op:reduce_scatter_tensor", "dtype:float64", "reduce_op:sum")
OF_FLOAT32 = ("op:all_gather_into_tensor", "op:reduce_scatter_tensor", "reduce_op:avg")

chapter = Chapter("fully_shard", source=DOCS, needs=NEEDS)


@chapter.must(
    "fully_shard/losses",
    "Each rank's forward under fully_shard gives what the bare module gives for its batch, in "
    "every iteration.",
)
@chapter.must(
    "fully_shard/training",
    "Steps of an optimizer leave on each rank its shards of the parameters that training of the "
    "bare module on the mean of the ranks' losses leaves.",
    rests_on="fully_shard/shards",
)
@chapter.must(
    "fully_shard/gradients",
    "After a backward, each shard's gradient is the rank's part of the mean gradient.",
    rests_on="fully_shard/shards",
)
@world_sizes(1, 2, 3, 4, at_least=1)
def test_training(ranks: Ranks) -> None:
    check_training(ranks, Recipe())


TRAINED = rows(
    (
        chapter.must(
            "fully_shard/root-alone",
            "A model that is one unit trains like the bare module.",
            rests_on="fully_shard/training",
        ),
        Recipe(units="root"),
    ),
    (
        chapter.must(
            "fully_shard/units-in-units",
            "fully_shard of modules within sharded modules trains like the bare module.",
            rests_on="fully_shard/training",
        ),
        Recipe(units="layers", net=Net(blocks=1, nested=True)),
    ),
    (
        chapter.must(
            "fully_shard/unit-of-several-modules",
            "Modules that one call makes a unit of train like the bare ones.",
            source=f"{DOCS}, a list of modules",
            rests_on="fully_shard/training",
        ),
        Recipe(units="list"),
    ),
    (
        chapter.must(
            "fully_shard/adaptive-optimizer",
            "An optimizer with state for each element, such as Adam, steps on shards as it does on "
            "the bare module's parameters.",
            rests_on="fully_shard/training",
        ),
        Recipe(optimizer="adam", within=1e-6),
    ),
    (
        chapter.must(
            "fully_shard/small-parameters",
            "Parameters with fewer rows than there are ranks train like the bare module's.",
            source="torch 2.13, FSDPParam: shards are padded",
            rests_on="fully_shard/training",
        ),
        Recipe(units="layers", net=Net(width=1, hidden=1, blocks=1, vocabulary=2)),
    ),
    (
        chapter.must(
            "fully_shard/float32",
            "In float32, in which the backend averages, training is the bare module's up to "
            "rounding.",
            source="torch 2.13, _get_gradient_divide_factors",
            needs=OF_FLOAT32,
        ),
        Recipe(net=Net(dtype="float32"), within=1e-4),
    ),
    (
        chapter.must(
            "fully_shard/tied",
            "A parameter with two names in one unit gets the gradients of both uses.",
            source="torch 2.13, _get_managed_states",
            rests_on="fully_shard/training",
        ),
        Recipe(net=Net(tied=True, blocks=1)),
    ),
    (
        chapter.must(
            "fully_shard/frozen-unit",
            "A unit of frozen parameters keeps their values and gives them no gradients, while "
            "gradients flow through it.",
            rests_on="fully_shard/training",
        ),
        Recipe(net=Net(frozen="block")),
    ),
    (
        chapter.must(
            "fully_shard/frozen-parts",
            "A unit may hold frozen and trained parameters: the frozen ones keep their values.",
            rests_on="fully_shard/training",
        ),
        Recipe(net=Net(frozen="parts")),
    ),
    (
        chapter.must(
            "fully_shard/accumulates",
            "Gradients of several backwards add up until they are cleared.",
            source="torch 2.13, foreach_reduce",
            rests_on="fully_shard/training",
        ),
        Recipe(backwards=(True, True)),
    ),
    (
        chapter.must(
            "fully_shard/two-forwards",
            "Two forwards before one backward give the gradients of both.",
            source="torch 2.13, FSDPParamGroup._backward_prefetch",
            rests_on="fully_shard/training",
        ),
        Recipe(forwards=2),
    ),
    (
        chapter.must(
            "fully_shard/kept-parameters",
            "With reshard_after_forward=False, training is the bare module's.",
            source=f"{DOCS}, reshard_after_forward",
            rests_on="fully_shard/training",
        ),
        Recipe(kwargs={"reshard_after_forward": False}),
    ),
    (
        chapter.must(
            "fully_shard/freed-parameters",
            "With reshard_after_forward=True for all units, the root too, training is the bare "
            "module's.",
            source=f"{DOCS}, reshard_after_forward",
            rests_on="fully_shard/training",
        ),
        Recipe(kwargs={"reshard_after_forward": True}),
    ),
)


@world_sizes(3)
@pytest.mark.parametrize("recipe", TRAINED)
def test_training_in_other_ways(ranks: Ranks, recipe: Recipe) -> None:
    check_training(ranks, recipe)


@chapter.must(
    "fully_shard/smaller-group-after-forward",
    "With an int as reshard_after_forward, parameters are divided among that many ranks between "
    "forward and backward, and training is the bare module's.",
    source=f"{DOCS}, reshard_after_forward",
    rests_on="fully_shard/training",
)
@world_sizes(4)
def test_a_smaller_group_after_forward(ranks: Ranks) -> None:
    check_training(ranks, Recipe(kwargs={"reshard_after_forward": 2}))


def of_rank(me: Me, recipe: Recipe) -> Run:
    """Ranks of odd numbers run torch's fully_shard."""
    return train(me, recipe, sharded(me, recipe, shard=torchs if me.rank % 2 else None))


@chapter.must(
    "fully_shard/mixed-job",
    "Ranks with torch's fully_shard and ranks with the target's train together.",
    source="observed, torch 2.13.0: the same collectives in the same order",
    rests_on="fully_shard/training",
)
@world_sizes(2, 3)
@pytest.mark.parametrize("recipe", [Recipe(), Recipe(units="list", backwards=(False, True))])
def test_torchs_ranks_among_the_targets(ranks: Ranks, recipe: Recipe) -> None:
    check_runs(ranks.run(of_rank, recipe), train_whole(recipe, ranks.world_size), recipe)
