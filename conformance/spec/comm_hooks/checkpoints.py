"""DDP communication hooks with activation checkpointing, also with a static graph."""

from __future__ import annotations

import pytest

from conformance import Chapter, Me, Ranks, world_sizes
from conformance.oracle.training import Step, optimizer_for, snapshot
from conformance.spec.checkpointing.networks import (
    EVERY_TIED,
    NON_REENTRANT,
    REENTRANT,
    TWICE,
    Recipe,
)
from conformance.spec.checkpointing.training import (
    CAP,
    STATIC,
    STEPS,
    Options,
    batch,
    loss_of,
    whole_steps,
)
from conformance.spec.comm_hooks.hooked import sum_of
from conformance.spec.ddp.training_runs import assert_trained

chapter = Chapter("comm_hooks")


def take_steps_with_a_hook(me: Me, recipe: Recipe, how: str, options: Options) -> list[Step]:
    """Train on half of what a hook makes of gradients that doubles their mean."""
    network = recipe.make(how).to(me.device)
    model = me.ddp(network, **options)
    model.register_comm_hook(
        None, lambda _, bucket: sum_of(bucket.buffer().mul_(2 / me.world_size))
    )
    optimizer = optimizer_for(network)
    done = []
    for i in range(STEPS):
        optimizer.zero_grad()
        loss_of(model(batch(me.rank, i).to(me.device).requires_grad_())).backward()
        for parameter in network.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(2)
        optimizer.step()
        done.append(snapshot(network))
    return done


@chapter.must(
    "comm_hooks/checkpoints",
    "A hook reduces the gradients that backward adds up through activation checkpoints, also in "
    "the first step of a static graph.",
    source="torch, reducer.cpp: delay_all_reduce hands buckets to the hook",
    needs="device:autocast",
    rests_on=("comm_hooks/result", "checkpointing/twice", "checkpointing/twice-static"),
)
@world_sizes(2, 3)
@pytest.mark.parametrize(
    ("how", "options"),
    [(REENTRANT, STATIC[0]), (REENTRANT, STATIC[2]), (NON_REENTRANT, CAP)],
    ids=["reentrant", "reentrant, views", "non-reentrant"],
)
@pytest.mark.parametrize("recipe", [TWICE, EVERY_TIED], ids=["twice", "tied"])
def test_a_hook_reduces_what_adds_up(
    ranks: Ranks, recipe: Recipe, how: str, options: Options
) -> None:
    got = ranks.run(take_steps_with_a_hook, recipe, how, options)
    assert_trained(got, whole_steps(recipe, ranks.world_size, STEPS))
