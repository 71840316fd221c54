"""Trains a network with activation checkpoints under DDP, and compares it with one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from conformance import CheckFailed, Me, Ranks
from conformance.oracle.training import Step, optimizer_for, snapshot
from conformance.spec.checkpointing.networks import WIDTH, Recipe, recomputed
from conformance.spec.ddp.training_runs import assert_trained

STEPS = 3  # buckets are made anew after the first, and a static graph is trusted from then on

# So small that every parameter has a bucket of its own.
CAP = {"bucket_cap_mb": 0.0001}

Options = Mapping[str, Any]


def combined(**choices: Sequence[Any]) -> list[dict[str, Any]]:
    """Every combination of these values, as arguments of the wrapper."""
    return [
        {**CAP, **dict(zip(choices, values, strict=True))} for values in product(*choices.values())
    ]


VIEWS = combined(gradient_as_bucket_view=[False, True])
VIEWS_AND_GRAPHS = combined(gradient_as_bucket_view=[False, True], static_graph=[False, True])
STATIC = combined(
    static_graph=[True],
    gradient_as_bucket_view=[False, True],
    find_unused_parameters=[False, True],
)
SEARCHING = combined(find_unused_parameters=[True], gradient_as_bucket_view=[False, True])
EVERY = VIEWS + STATIC + SEARCHING


def loss_of(y: Tensor) -> Tensor:
    """A loss of which every element of the output has another gradient."""
    weights = torch.arange(1, y.numel() + 1, dtype=y.dtype, device=y.device).sin()
    return (y * weights.view(y.shape)).sum() + y.square().sum() / 5


def batch(rank: int, step: int, size: int = 2) -> Tensor:
    """What a rank feeds the network in a step, (size, WIDTH)."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(size, WIDTH, generator=generator, dtype=torch.float64)


def take_steps(
    me: Me, recipe: Recipe, how: str, options: Options, steps: int = STEPS, around: bool = False
) -> list[Step]:
    """Train; what the network is like after each step.

    around: the checkpoint is around the wrapper, not in the network.
    """
    network = recipe.make("" if around else how).to(me.device)
    model = me.ddp(network, **options)
    optimizer = optimizer_for(network)
    done = []
    for i in range(steps):
        optimizer.zero_grad()
        # The reentrant kind gives gradients only to what has an input that requires some.
        x = batch(me.rank, i).to(me.device).requires_grad_()
        loss_of(recomputed(model, x, how=how if around else "")).backward()
        optimizer.step()
        done.append(snapshot(network))
    return done


def take_steps_with_each(
    me: Me, recipe: Recipe, how: str, choices: Sequence[Options], steps: int, around: bool
) -> list[list[Step]]:
    """As `take_steps`, once with each choice of options."""
    done = []
    for options in choices:
        print(f"with {dict(options)}")
        done.append(take_steps(me, recipe, how, options, steps, around))
    return done


def train_and_compare(
    ranks: Ranks,
    recipe: Recipe,
    how: str,
    choices: Sequence[Options],
    steps: int = STEPS,
    around: bool = False,
) -> None:
    """Train with each choice of options, and compare with one process that keeps everything."""
    got = ranks.run(take_steps_with_each, recipe, how, choices, steps, around)
    want = whole_steps(recipe, ranks.world_size, steps)
    for options, found in zip(choices, zip(*got, strict=True), strict=True):
        try:
            assert_trained(found, want)
        except CheckFailed as wrong:
            raise CheckFailed(f"with {dict(options)}: {wrong}", wrong.rank) from None


def whole_steps(recipe: Recipe, world_size: int, steps: int) -> list[Step]:
    """The same steps in one process and without checkpoints, on the batches of all ranks.

    A recipe of several paths takes the next one at every step, not at every rank's batch.
    """
    network = recipe.make("")
    optimizer = optimizer_for(network)
    done = []
    for i in range(steps):
        optimizer.zero_grad()
        for rank in range(world_size):
            network.calls = i
            (loss_of(network(batch(rank, i))) / world_size).backward()
        optimizer.step()
        done.append(snapshot(network))
    return done
