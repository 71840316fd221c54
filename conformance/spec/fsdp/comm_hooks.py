"""Communication hooks of FSDP: custom ones, NO_SHARD, and torch's default hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.algorithms._comm_hooks import default_hooks

from conformance import (
    Chapter,
    Me,
    Ranks,
    assert_same_on_all_ranks,
    world_sizes,
)
from conformance.spec.fsdp.models import Net, units_of
from conformance.spec.fsdp.training_runs import (
    STRATEGIES,
    Recipe,
    both_kinds,
    check_tensors,
    full_parameters,
    train_step,
    train_whole,
)

DOCS = "torch 2.13 docs, FullyShardedDataParallel"

chapter = Chapter("fsdp")


class Calls:
    """A hook's state: what it was called with."""

    def __init__(self) -> None:
        self.numels: list[list[int]] = []


def leave_ones(calls: Calls, grad: Tensor, chunk: Tensor) -> None:
    calls.numels.append([grad.numel(), chunk.numel()])
    chunk.fill_(1.0)


def make_ones(calls: Calls, grad: Tensor) -> None:
    calls.numels.append([grad.numel()])
    grad.fill_(1.0)


def hooked(me: Me, strategy: str) -> tuple[list[list[int]], list[float]]:
    """What the hook got in a backward, and distinct values of the gradients."""
    model = Recipe(strategy=strategy).wrapped(me)
    calls = Calls()
    model.register_comm_hook(calls, make_ones if strategy == "NO_SHARD" else leave_ones)
    Net().loss(model, me.rank, 0, me.device).backward()
    grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return calls.numels, torch.cat(grads).unique().tolist()


@chapter.must(
    "fsdp/comm-hook",
    "A communication hook is called once per unit and backward with its state, the padded "
    "gradient and a chunk to fill; the contents of the chunk become the gradient.",
    source=f"{DOCS}, register_comm_hook",
)
@world_sizes(2, 3)
def test_a_hook_reduces(ranks: Ranks) -> None:
    root, *blocks = units_of(Net(), ranks.world_size)
    want = [[unit.padded, unit.chunk] for unit in (*blocks[::-1], root)]
    for strategy in STRATEGIES[:2]:
        got = ranks.run(hooked, strategy)
        assert_same_on_all_ranks(got, (want, [1.0]), what="calls and gradients")


@chapter.must(
    "fsdp/comm-hook-no-shard",
    "With NO_SHARD, a communication hook gets the gradient and reduces it in place.",
    source=f"{DOCS}, register_comm_hook",
)
@world_sizes(2)
def test_a_hook_reduces_in_place(ranks: Ranks) -> None:
    want = sorted([unit.unpadded] for unit in units_of(Net(), 1))
    got = [(sorted(numels), values) for numels, values in ranks.run(hooked, "NO_SHARD")]
    assert_same_on_all_ranks(got, (want, [1.0]), what="calls and gradients")


def train_with_hook(me: Me, recipe: Recipe) -> dict[str, Tensor]:
    """Parameters after training with torch's own hooks."""
    model = recipe.wrapped(me)
    hook: Callable[..., Any] = default_hooks.reduce_scatter_hook
    if recipe.strategy == "NO_SHARD":
        hook = default_hooks.allreduce_hook
    state = default_hooks.DefaultState(model.process_group)
    model.register_comm_hook(state, hook)
    optimizer = recipe.optimizer_of(model)
    for step in range(recipe.steps):
        train_step(me, recipe, model, optimizer, step)
    return full_parameters(model)


@chapter.must(
    "fsdp/default-hooks",
    "With torch's default hooks, which average, training is the same as without a hook.",
    source="torch 2.13, torch.distributed.algorithms._comm_hooks.default_hooks",
)
@world_sizes(3)
@both_kinds
def test_the_default_hooks(ranks: Ranks, orig: bool) -> None:
    for strategy in STRATEGIES:
        recipe = Recipe(strategy=strategy, orig=orig, steps=2)
        want = [run.params for run in train_whole(recipe, ranks.world_size)]
        check_tensors(ranks.run(train_with_hook, recipe), want)
