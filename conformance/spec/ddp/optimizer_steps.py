"""DDP with optimizers in backward, with fused optimizers, and with ZeroRedundancyOptimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from conformance import Chapter, Me, Ranks, assert_same_on_all_ranks, assert_that, world_sizes
from conformance.spec.ddp.models import WIDTH, Perceptron, Recipe, loss_of, normal
from conformance.spec.ddp.optimizers import (
    ZeroRedundancyOptimizer,
    apply_optimizer_in_backward,
)
from conformance.spec.ddp.training_runs import Options, assert_grads

chapter = Chapter("ddp")


RATE = 0.1


def step_by(
    me: Me, way: str, kind: type[torch.optim.Optimizer], options: Options
) -> tuple[list[Tensor], bool]:
    """Parameters after some steps, and whether gradients are None after backward."""
    module = Recipe(Perceptron)(seed=0).to(me.device)
    if way == "in backward, early":
        apply_optimizer_in_backward(kind, module.parameters(), {"lr": RATE})
    model = me.ddp(module, **options)
    optimizer: Any = None
    if way == "in backward":
        apply_optimizer_in_backward(kind, module.parameters(), {"lr": RATE})
    elif way == "in backward, two":  # plain steps on one gradient add up
        for share in (0.2, 0.8):
            apply_optimizer_in_backward(kind, module.parameters(), {"lr": share * RATE})
    elif way == "fused":
        model._register_fused_optim(kind, lr=RATE)
    elif way == "zero":
        optimizer = ZeroRedundancyOptimizer(model.parameters(), kind, lr=RATE)
    without = True
    for i in range(4):
        model.zero_grad()
        loss_of(model(normal((2, WIDTH), 10 * i + me.rank).to(me.device))).backward()
        without = without and all(p.grad is None for p in module.parameters())
        if optimizer is not None:
            optimizer.step()
    return [p.detach().clone() for p in module.parameters()], without


def assert_stepped(
    ranks: Ranks, way: str, kind: type[torch.optim.Optimizer], options: Options
) -> list[bool]:
    got = ranks.run(step_by, way, kind, options)
    module = Recipe(Perceptron)()
    make: Any = kind
    optimizer = make(module.parameters(), lr=RATE)
    for i in range(4):
        optimizer.zero_grad()
        for r in range(ranks.world_size):
            x = normal((2, WIDTH), 10 * i + r)
            (loss_of(module(x)) / ranks.world_size).backward()
        optimizer.step()
    for j, parameter in enumerate(module.parameters()):
        # Adam divides by roots of sums, which makes more of rounding than SGD does.
        assert_grads([params[j] for params, _ in got], parameter.detach(), f"{j}", within=1e-6)
    assert_same_on_all_ranks([params for params, _ in got], what="parameters")
    return [without for _, without in got]


@chapter.must(
    "ddp/optimizer/in-backward",
    "An optimizer that was applied in backward steps on averaged gradients, and gradients are "
    "None afterwards.",
    source="torch 2.13, test_ddp_apply_optim_in_backward",
    needs="feature:ddp_optimizer_in_backward_on_cpu",
    rests_on="ddp/average",
)
@world_sizes(3)
@pytest.mark.parametrize(
    "way",
    ["in backward, early", "in backward", "in backward, two"],
    ids=["before", "after", "two"],
)
@pytest.mark.parametrize("view", [False, True], ids=["apart", "view"])
def test_optimizers_in_backward(ranks: Ranks, way: str, view: bool) -> None:
    options = {"gradient_as_bucket_view": view}
    without = assert_stepped(ranks, way, torch.optim.SGD, options)
    for rank, none in enumerate(without):
        assert_that(none, "a gradient was left behind", rank)


@chapter.should(
    "ddp/optimizer/fused",
    "_register_fused_optim steps a functional optimizer bucket by bucket, with the result that "
    "the optimizer itself has after averaging.",
    source="torch 2.13, test_ddp_hook_with_optimizer_parity_sgd and _adam",
    rests_on="ddp/average",
)
@world_sizes(2)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam], ids=["sgd", "adam"])
def test_fused_optimizers(ranks: Ranks, kind: type[torch.optim.Optimizer]) -> None:
    assert_stepped(ranks, "fused", kind, {})


@chapter.should(
    "ddp/optimizer/zero-redundancy",
    "ZeroRedundancyOptimizer on a wrapper's parameters trains like the optimizer that it shards.",
    source="torch 2.13 docs, ZeroRedundancyOptimizer",
    rests_on="ddp/average",
)
@world_sizes(2)
def test_zero_redundancy(ranks: Ranks) -> None:
    assert_stepped(ranks, "zero", torch.optim.SGD, {})
