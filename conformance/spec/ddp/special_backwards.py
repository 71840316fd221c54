"""DDP backward in special cases: recomputed layers, skipped buckets, autograd.grad, penalties."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from conformance import Chapter, Me, Ranks, assert_same_on_all_ranks, world_sizes
from conformance.spec.ddp.models import WIDTH, Branching, Perceptron, Recipe, loss_of, normal
from conformance.spec.ddp.training_runs import Options, assert_grads, batches, mine, train

DOCS = "torch 2.13 docs, DistributedDataParallel"

chapter = Chapter("ddp")


BYTE = 2**-20
LARGE = 256


class Recomputing(nn.Module):
    """One large layer between two small ones, twice under a reentrant checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, LARGE, bias=False).double()
        self.large = nn.Linear(LARGE, LARGE, bias=False).double()
        self.last = nn.Linear(LARGE, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.large, x.tanh(), use_reentrant=True)
        y: Tensor = self.last(x)
        return y


@chapter.must(
    "ddp/static-graph/large-layer-in-several-checkpoints",
    "A layer of any size that runs in several reentrant checkpoints gets the mean of the "
    "gradients that they all add up, also if gradients are views of buckets.",
    source=f"{DOCS}, static_graph: reentrant backwards, activation checkpointing multiple times",
    needs="device:autocast",
    rests_on="ddp/static-graph/values",
)
@world_sizes(2)
@pytest.mark.parametrize("view", [False, True], ids=["apart", "view"])
def test_a_large_layer_is_recomputed_twice(ranks: Ranks, view: bool) -> None:
    options = {"static_graph": True, "gradient_as_bucket_view": view}
    train(ranks, Recipe(Recomputing), batches(2, 3, (2, WIDTH)), options)


def keep(me: Me, options: Options) -> list[Tensor]:
    """The gradient of a branch that the first of three steps alone uses."""
    module = Recipe(Branching)(seed=me.rank).to(me.device)
    model = me.ddp(module, **options)
    seen = []
    for i, uses in enumerate([[0, 1], [0], [0]]):
        loss_of(model(normal((2, WIDTH), 10 * i + me.rank).to(me.device), uses)).backward()
        grad = module.get_parameter("branches.1.weight").grad
        assert grad is not None
        seen.append(grad.clone())
    return seen


@chapter.must(
    "ddp/unused/skipped-buckets-keep-gradients",
    "With skip_all_reduce_unused_params a gradient that stays from an earlier step is the same "
    "after a step that skips its bucket.",
    source="torch, reducer.cpp: the gradient of a parameter that no rank used must not be touched",
    rests_on="ddp/unused/skipped-buckets",
)
@world_sizes(2)
@pytest.mark.parametrize("view", [False, True], ids=["apart", "view"])
def test_a_skipped_bucket_keeps_its_gradients(ranks: Ranks, view: bool) -> None:
    options = {
        "find_unused_parameters": True,
        "skip_all_reduce_unused_params": True,
        "bucket_cap_mb": BYTE,
        "gradient_as_bucket_view": view,
    }
    got = ranks.run(keep, options)
    module = Recipe(Branching)()
    for r in range(2):
        (loss_of(module(normal((2, WIDTH), r), [0, 1])) / 2).backward()
    want = module.get_parameter("branches.1.weight").grad
    for i in range(3):
        assert_grads([grads[i] for grads in got], want, f"gradient after step {i + 1}")


def walk_again(me: Me, steps: list[Tensor]) -> list[list[Tensor | None]]:
    """Gradients of steps after each of which the graph is walked again, to the input alone."""
    module = Recipe(Perceptron)(seed=me.rank).to(me.device)
    model = me.ddp(module)
    done = []
    for i, batch in enumerate(steps):
        model.zero_grad()
        x = batch.to(me.device).requires_grad_()
        loss = loss_of(model(x))
        loss.backward(retain_graph=True)
        if i % 2:
            loss.backward(inputs=[x])
        else:
            torch.autograd.grad(loss, x)
        done.append([None if p.grad is None else p.grad.clone() for p in module.parameters()])
    return done


@chapter.must(
    "ddp/backward/autograd-grad-of-an-averaged-graph",
    "After torch.autograd.grad of a graph whose gradients were averaged already, and after a "
    "backward pass to an input alone, the next steps are right.",
    source="torch 2.13 docs, autograd.grad and backward: leaves that are not asked for are left "
    "alone",
    rests_on="ddp/backward/autograd-grad-is-local",
)
@world_sizes(2)
def test_an_averaged_graph_is_walked_to_the_input(ranks: Ranks) -> None:
    steps = [[normal((2, WIDTH), 10 * i + r) for r in range(2)] for i in range(4)]
    got = ranks.run_each(walk_again, [(mine(steps, r),) for r in range(2)])
    assert_same_on_all_ranks(got, what="gradients")
    for i, step in enumerate(steps):
        module = Recipe(Perceptron)()
        for batch in step:
            (loss_of(module(batch)) / 2).backward()
        for j, parameter in enumerate(module.parameters()):
            grads = [mine_[i][j] for mine_ in got]
            assert_grads(grads, parameter.grad, f"gradient {j} in step {i + 1}")


def penalty_of(model: Any, x: Tensor) -> Tensor:
    """The output, and how far the length of its gradient is from 1."""
    output = model(x)
    (slope,) = torch.autograd.grad(loss_of(output), x, create_graph=True)
    return loss_of(output) + (slope.square().sum() - 1).square()


def penalise(me: Me, steps: list[Tensor], options: Options) -> list[list[Tensor | None]]:
    module = Recipe(Perceptron)(seed=me.rank).to(me.device)
    model = me.ddp(module, **options)
    done = []
    for batch in steps:
        model.zero_grad()
        penalty_of(model, batch.to(me.device).requires_grad_()).backward()
        done.append([None if p.grad is None else p.grad.clone() for p in module.parameters()])
    return done


@chapter.should(
    "ddp/static-graph/gradient-penalty",
    "The loss may contain the gradient with respect to an input, which torch.autograd.grad "
    "computes before the first backward pass.",
    source=f"{DOCS}, static_graph; the gradient penalty of Wasserstein GANs (arXiv:1704.00028)",
    rests_on="ddp/static-graph/values",
)
@world_sizes(2)
def test_a_gradient_penalty_in_a_static_graph(ranks: Ranks) -> None:
    steps = [[normal((2, WIDTH), 10 * i + r) for r in range(2)] for i in range(3)]
    got = ranks.run_each(penalise, [(mine(steps, r), {"static_graph": True}) for r in range(2)])
    assert_same_on_all_ranks(got, what="gradients")
    for i, step in enumerate(steps):
        module = Recipe(Perceptron)()
        for batch in step:
            (penalty_of(module, batch.clone().requires_grad_()) / 2).backward()
        for j, parameter in enumerate(module.parameters()):
            grads = [mine_[i][j] for mine_ in got]
            assert_grads(grads, parameter.grad, f"gradient {j} in step {i + 1}")
