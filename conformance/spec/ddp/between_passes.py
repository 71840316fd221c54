"""DDP steps with gradients cleared, hooked or NaN, frozen parameters, changed outputs, errors."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conformance import Chapter, Me, Ranks, assert_same_on_all_ranks, assert_that, world_sizes
from conformance.spec.ddp.models import WIDTH, Branching, Perceptron, Recipe, loss_of, normal
from conformance.spec.ddp.training_runs import Options, assert_grads
from conformance.spec.raising import assert_raised
from conformance.spec.waiting import wait_until_freed

DOCS = "torch 2.13 docs, DistributedDataParallel"
OBSERVED = "observed, torch 2.13.0"

chapter = Chapter("ddp")


SEARCH: Options = {"find_unused_parameters": True}
OPTIONS: list[Options] = [{}, SEARCH, {"static_graph": True}, {"gradient_as_bucket_view": True}]
Between = Callable[[Any, Any, Tensor], Any]  # model, its output, its input


def clear(model: Any, output: Tensor, x: Tensor) -> Tensor:
    model.zero_grad()
    return output


def set_to_zero(model: Any, output: Tensor, x: Tensor) -> Tensor:
    model.zero_grad(set_to_none=False)
    return output


def evaluate(model: Any, output: Tensor, x: Tensor) -> Tensor:
    model.zero_grad()
    for mode in (False, True):
        model.train(mode)
        with torch.no_grad():
            model(x * 2)
    return output


def change(model: Any, output: Tensor, x: Tensor) -> Tensor:
    model.zero_grad()
    return output.mul_(2).add_(1)


def steps_with(me: Me, between: Between, options: Options) -> list[list[Tensor]]:
    """All gradients after each of some steps."""
    module = Recipe(Perceptron)(seed=me.rank).to(me.device)
    model = me.ddp(module, **options)
    seen = []
    for i in range(3):
        x = normal((2, WIDTH), 10 * i + me.rank).to(me.device)
        loss_of(between(model, model(x), x)).backward()
        seen.append([p.grad.clone() for p in module.parameters() if p.grad is not None])
    return seen


def assert_steps(ranks: Ranks, between: Between, options: Options) -> None:
    got = ranks.run(steps_with, between, options)
    n = ranks.world_size
    module = Recipe(Perceptron)()
    for i in range(3):
        module.zero_grad()
        for rank in range(n):
            x = normal((2, WIDTH), 10 * i + rank)
            output = module(x)
            (loss_of(output * 2 + 1 if between is change else output) / n).backward()
        for j, param in enumerate(module.parameters()):
            mine = [grads[i][j] for grads in got]
            assert_grads(mine, param.grad, f"gradient {j} in step {i + 1}")


@chapter.must(
    "ddp/between/cleared-gradients",
    "Gradients that are cleared between forward and backward, to None or to zeros, start afresh.",
    source="torch 2.13 docs, zero_grad: usually called just before backward",
    rests_on="ddp/backward/zero-grad",
)
@world_sizes(1, 2)
@pytest.mark.parametrize("between", [clear, set_to_zero], ids=["none", "zero"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradients_are_cleared(ranks: Ranks, between: Between, options: Options) -> None:
    assert_steps(ranks, between, options)


@chapter.must(
    "ddp/between/forward-without-gradients",
    "Forward passes without grad mode between forward and backward do not change any gradient.",
    source=f"{DOCS}; targets of a second view, as in BYOL (arXiv:2006.07733)",
    rests_on="ddp/inference",
)
@world_sizes(2)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_forward_without_gradients(ranks: Ranks, options: Options) -> None:
    assert_steps(ranks, evaluate, options)


@chapter.must(
    "ddp/between/outputs-changed-in-place",
    "Outputs may be changed in place before the loss, with every way of handling unused "
    "parameters.",
    source="torch, distributed.py: _DDPSink clones outputs so that they can be modified in place",
    rests_on="ddp/outputs",
)
@world_sizes(2)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_outputs_are_changed(ranks: Ranks, options: Options) -> None:
    assert_steps(ranks, change, options)


class Refusing(nn.Module):
    """Raises where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = Perceptron()

    def forward(self, x: Tensor, raises: bool) -> Tensor:
        y: Tensor = self.layers(x)
        if raises:
            raise ArithmeticError("refused by the module")
        return y


def refuse(me: Me) -> None:
    model = me.ddp(Refusing().to(me.device))
    model(normal((2, WIDTH), me.rank).to(me.device), True)


def after_refusals(me: Me, options: Options) -> list[Tensor]:
    """One gradient after each step, before each of which forward has raised."""
    module = Recipe(Refusing)(seed=me.rank).to(me.device)
    model = me.ddp(module, **options)
    seen = []
    for i in range(3):
        x = normal((2, WIDTH), 10 * i + me.rank).to(me.device)
        model.zero_grad()
        with contextlib.suppress(ArithmeticError):
            model(x, True)
        loss_of(model(x, False)).backward()
        grad = module.get_parameter("layers.layers.0.weight").grad
        assert grad is not None
        seen.append(grad.clone())
    return seen


@chapter.must(
    "ddp/between/forward-that-raises",
    "If the module's forward raises on every rank, the exception comes out unchanged, and the "
    "next step is right.",
    source=f"{OBSERVED}: what is to be reduced is known after the module's forward",
    rests_on="ddp/average",
)
@world_sizes(2)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_forward_raises(ranks: Ranks, options: Options) -> None:
    assert_raised(ranks.outcomes(refuse), ArithmeticError, match="refused by the module")
    got = ranks.run(after_refusals, options)
    for i in range(3):
        module = Recipe(Refusing)()
        for rank in range(2):
            (loss_of(module(normal((2, WIDTH), 10 * i + rank), False)) / 2).backward()
        want = module.get_parameter("layers.layers.0.weight").grad
        assert_grads([grads[i] for grads in got], want, f"gradient in step {i + 1}")


def hooked(me: Me, kind: str, options: Options) -> list[tuple[Tensor, Tensor]]:
    """In each step, what the hook was given and the gradient in the end."""
    module = Recipe(Perceptron, ((WIDTH, 2),))(seed=0).to(me.device)
    model = me.ddp(module, **options)
    weight = module.get_parameter("layers.0.weight")
    given: list[Tensor] = []

    def scale(grad: Tensor) -> Tensor:
        given.append(grad.clone())
        return grad * (me.rank + 1)

    def scale_accumulated(param: Tensor) -> None:
        assert param.grad is not None
        param.grad.copy_(scale(param.grad))

    if kind == "tensor":
        weight.register_hook(scale)
    else:
        weight.register_post_accumulate_grad_hook(scale_accumulated)
    seen = []
    for i in range(3):
        model.zero_grad()
        loss_of(model(normal((2, WIDTH), 10 * i + me.rank).to(me.device))).backward()
        assert weight.grad is not None
        seen.append((given[-1], weight.grad.clone()))
    return seen


@chapter.must(
    "ddp/between/parameter-hooks",
    "Tensor hooks and post-accumulate-gradient hooks see this rank's own gradients, and the "
    "gradients that they produce are averaged.",
    source=f"{OBSERVED}: the reducer's hooks come after all others of a parameter",
    rests_on="ddp/average",
)
@world_sizes(2)
@pytest.mark.parametrize("kind", ["tensor", "accumulated"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_hooks_of_parameters(ranks: Ranks, kind: str, options: Options) -> None:
    got = ranks.run(hooked, kind, options)
    for i in range(3):
        own = []
        for rank in range(2):
            module = Recipe(Perceptron, ((WIDTH, 2),))()
            loss_of(module(normal((2, WIDTH), 10 * i + rank))).backward()
            grad = module.get_parameter("layers.0.weight").grad
            assert grad is not None
            own.append(grad)
            assert_grads([got[rank][i][0]], grad, f"what the hook of rank {rank} was given")
        want = (own[0] + 2 * own[1]) / 2
        assert_grads([seen[i][1] for seen in got], want, f"gradient in step {i + 1}")


def halfway(me: Me, inside: str) -> list[Tensor]:
    """The gradient after each step; forward or backward is inside no_sync."""
    module = Recipe(Perceptron, ((WIDTH, 1),))().to(me.device)
    model = me.ddp(module)
    x = torch.full((1, WIDTH), 1.0 + 2 * me.rank, dtype=torch.float64, device=me.device)
    seen = []
    for _ in range(3):
        model.zero_grad()
        with model.no_sync() if inside == "forward" else contextlib.nullcontext():
            output = model(x)
        with model.no_sync() if inside == "backward" else contextlib.nullcontext():
            output.sum().backward()
        grad = module.get_parameter("layers.0.weight").grad
        assert grad is not None
        seen.append(grad.clone())
    return seen


@chapter.must(
    "ddp/no-sync/forward-decides",
    "A backward pass is synchronised if its forward pass was outside no_sync, wherever the "
    "backward pass itself runs.",
    source=f"{DOCS}, no_sync: the forward pass should be included, or gradients are synchronised",
    rests_on="ddp/no-sync/accumulates",
)
@world_sizes(2)
@pytest.mark.parametrize("inside", ["forward", "backward"])
def test_one_of_two_is_inside_no_sync(ranks: Ranks, inside: str) -> None:
    for rank, seen in enumerate(ranks.run(halfway, inside)):
        wanted = 1.0 + 2 * rank if inside == "forward" else 2.0
        for i, grad in enumerate(seen):
            right = bool((grad == wanted).all())
            assert_that(right, f"step {i + 1}: {grad.tolist()}, want {wanted}", rank)


def by_turns(me: Me, options: Options) -> list[list[Tensor | None]]:
    """Both gradients after each step; one of the parameters is frozen in it."""
    module = Recipe(Branching, (2,))(seed=me.rank).to(me.device)
    model = me.ddp(module, **options)
    seen = []
    for frozen in (0, 1, 0, None):
        for k, weight in enumerate(module.parameters()):
            weight.requires_grad_(k != frozen)
        model.zero_grad()
        loss_of(model(normal((2, WIDTH), me.rank).to(me.device), [0, 1])).backward()
        seen.append([copy.copy(weight.grad) for weight in module.parameters()])
    return seen


@chapter.should(
    "ddp/unused/frozen-later",
    "With find_unused_parameters, parameters may be frozen for some steps after wrapping, as the "
    "parts of a GAN are in turn: they keep their gradients, and the others are averaged.",
    source=f"{OBSERVED}: a frozen parameter is not in the graph",
    rests_on="ddp/unused/everywhere",
)
@world_sizes(2)
@pytest.mark.parametrize("view", [False, True], ids=["apart", "view"])
def test_parameters_are_frozen_by_turns(ranks: Ranks, view: bool) -> None:
    got = ranks.run(by_turns, {**SEARCH, "gradient_as_bucket_view": view})
    module = Recipe(Branching, (2,))()
    for rank in range(2):
        (loss_of(module(normal((2, WIDTH), rank), [0, 1])) / 2).backward()
    for i, frozen in enumerate((0, 1, 0, None)):
        for k, weight in enumerate(module.parameters()):
            want = None if k == frozen else weight.grad
            what = f"gradient {k} in step {i + 1}"
            assert_grads([seen[i][k] for seen in got], want, what)


class Mark:
    """Lives as long as the graph that it is put into."""


class Marked(torch.autograd.Function):
    """Hands x through, and has a mark in the graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mark: Mark) -> Tensor:
        ctx.mark = mark
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def graphs_alive(me: Me, options: Options) -> list[bool]:
    """Whether the graph of each step lives on without its output, with a backward pass or not."""
    model = me.ddp(Recipe(Perceptron)().to(me.device), **options)
    seen = []
    for i in range(4):
        mark = Mark()
        alive = weakref.ref(mark)
        x = normal((2, WIDTH), i).to(me.device).requires_grad_()
        output = model(Marked.apply(x, mark))  # type: ignore[no-untyped-call]  # in torch
        if i != 2:
            loss_of(output).backward()
        del mark, output
        wait_until_freed(alive)
        seen.append(alive() is not None)
    return seen


@chapter.must(
    "ddp/between/outputs-are-let-go",
    "The wrapper does not keep an output, and with it the graph, alive when the user drops it.",
    source=OBSERVED,
    rests_on="ddp/average",
)
@world_sizes(1, 2)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_outputs_are_let_go(ranks: Ranks, options: Options) -> None:
    assert_same_on_all_ranks(ranks.run(graphs_alive, options), [False] * 4, what="alive")


def with_one_spoilt(me: Me, value: float, options: Options) -> list[bool]:
    """Whether each gradient is finite; the last rank's are not."""
    module = Recipe(Perceptron)().to(me.device)
    model = me.ddp(module, **options)
    seen = []
    for i in range(3):
        model.zero_grad()
        loss = loss_of(model(normal((2, WIDTH), i).to(me.device)))
        (loss * (value if me.rank == me.world_size - 1 and i != 1 else 1.0)).backward()
        grads = [p.grad for p in module.parameters() if p.grad is not None]
        seen.append(all(bool(grad.isfinite().all()) for grad in grads))
    return seen


@chapter.must(
    "ddp/gradients/not-finite",
    "An infinity or NaN in one rank's gradient appears in the gradients of all ranks, so that "
    "all skip the step.",
    source="torch 2.13 docs, GradScaler: steps with infs or NaNs are skipped",
    rests_on="ddp/average",
)
@world_sizes(2, 3)
@pytest.mark.parametrize("value", [float("inf"), float("nan")], ids=["inf", "nan"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradients_that_are_not_finite(ranks: Ranks, value: float, options: Options) -> None:
    got = ranks.run(with_one_spoilt, value, options)
    assert_same_on_all_ranks(got, [False, True, False], what="finite")
