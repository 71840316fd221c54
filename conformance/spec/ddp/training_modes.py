"""DDP with evaluation, autocast, module hooks, functional_call and converted modules."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conformance import (
    Chapter,
    Me,
    Ranks,
    assert_same_on_all_ranks,
    assert_that,
    world_sizes,
)
from conformance.oracle.near import Near
from conformance.oracle.training import Step, train_whole
from conformance.spec.ddp.models import (
    WIDTH,
    Perceptron,
    Recipe,
    Scaled,
    loss_of,
    normal,
)
from conformance.spec.ddp.training_runs import (
    Options,
    batches,
    mine,
    train,
)
from conformance.spec.tolerance import assert_near

DOCS = "torch 2.13 docs, DistributedDataParallel"
REDUCER = "torch, reducer.cpp"

chapter = Chapter("ddp")


def evaluate_between(me: Me, recipe: Recipe, steps: list[Any]) -> list[Step]:
    """Training steps with evaluation in between, as often as the rank's number says."""
    module = recipe(seed=me.rank).to(me.device)
    model = me.ddp(module)
    optimizer = torch.optim.SGD(module.parameters(), 0.1, 0.9)
    done = []
    for (x,) in steps:
        with torch.no_grad():
            for i in range(me.rank + 1):
                model.train(i % 2 == 0)
                want = module(x.to(me.device))
                assert_that(torch.equal(model(x.to(me.device)), want), "another output", me.rank)
        model.train()
        optimizer.zero_grad()
        loss_of(model(x.to(me.device))).backward()
        optimizer.step()
        done.append(Step({n: p.grad for n, p in module.named_parameters()}, _params(module)))
    return done


def _params(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


@chapter.must(
    "ddp/inference",
    "Without grad mode forward works, in train and eval mode, with more or fewer calls on some "
    "ranks if there are no buffers; training continues afterwards.",
    source="torch 2.13, test_ddp_inference; pytorch#47736",
    rests_on="ddp/average",
)
@world_sizes(2, 3)
def test_evaluation_between_steps(ranks: Ranks) -> None:
    recipe = Recipe(Perceptron)
    steps = batches(ranks.world_size, 3, (2, WIDTH))
    want = train_whole(recipe(), steps, loss_of)
    got = ranks.run_each(
        evaluate_between, [(recipe, mine(steps, r)) for r in range(ranks.world_size)]
    )
    for name, param in want[-1].params.items():
        near = [Near.relative(param, 1e-9)] * len(got)
        assert_near([steps[-1].params[name] for steps in got], near, name)


def train_with_autocast(me: Me, x: Tensor, view: bool) -> tuple[str, Tensor, Tensor]:
    """The dtype of the output; all gradients, averaged by the wrapper; and this rank's own."""
    module = Recipe(Perceptron, ((WIDTH, 2), "float32"))().to(me.device)
    alone = copy.deepcopy(module)
    model = me.ddp(module, gradient_as_bucket_view=view)
    for each in (model, alone, model):
        each.zero_grad()
        with torch.autocast(me.device.type, torch.bfloat16):
            y = each(x.to(me.device))
        y.float().square().sum().backward()
    return str(y.dtype), all_gradients(module), all_gradients(alone)


def all_gradients(module: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


@chapter.must(
    "ddp/autocast",
    "Under autocast the module computes in the lower precision, and gradients of float32 "
    "parameters are averaged in float32.",
    source="torch 2.13, test_DistributedDataParallel_with_amp_and_grad_is_view",
    needs=("dtype:bfloat16", "device:autocast"),
    rests_on="ddp/average",
)
@world_sizes(2)
@pytest.mark.parametrize("view", [False, True], ids=["apart", "view"])
def test_autocast(ranks: Ranks, view: bool) -> None:
    xs = [normal((3, WIDTH), rank, "float32") for rank in range(2)]
    got = ranks.run_each(train_with_autocast, [(x, view) for x in xs])
    assert_same_on_all_ranks([dtype for dtype, _, _ in got], "torch.bfloat16", what="dtype")
    # In bfloat16 the sum itself would be rounded, by a 256th.
    mean = Near.relative(sum(alone for _, _, alone in got) / 2, 1e-6)
    assert_near([averaged for _, averaged, _ in got], [mean] * 2, "gradients")


def count_hooks(me: Me) -> dict[str, int]:
    module = Perceptron().to(me.device)
    model = me.ddp(module)
    calls: dict[str, int] = {}

    def count(name: str) -> Any:
        calls[name] = 0

        def hook(*_: Any) -> None:
            calls[name] += 1

        return hook

    model.register_forward_pre_hook(count("before the wrapper"))
    model.register_forward_hook(count("after the wrapper"))
    model.register_full_backward_hook(count("behind the wrapper"))
    module.layers[0].register_forward_hook(count("after a layer"))
    module.layers[0].register_full_backward_hook(count("behind a layer"))
    next(module.parameters()).register_hook(count("of a parameter"))
    for _ in range(3):
        x = torch.ones(2, WIDTH, dtype=torch.float64, device=me.device, requires_grad=True)
        loss_of(model(x)).backward()
    return calls


@chapter.must(
    "ddp/module-hooks",
    "Forward and backward hooks of the wrapper and of the module's parts run once per pass.",
    source="torch 2.13, test_ddp_forward_backward_hook; pytorch#35191",
    rests_on="ddp/average",
)
@world_sizes(2)
def test_hooks_run_once_a_pass(ranks: Ranks) -> None:
    names = ["before the wrapper", "after the wrapper", "behind the wrapper"]
    names += ["after a layer", "behind a layer", "of a parameter"]
    assert_same_on_all_ranks(ranks.run(count_hooks), dict.fromkeys(names, 3), what="calls")


def call_functionally(me: Me) -> tuple[Tensor, list[bool]]:
    module = Scaled("float64").to(me.device)
    model = me.ddp(module)
    given = {"module.weight": torch.full((3,), 2.0 + me.rank).double().to(me.device)}
    y = torch.func.functional_call(model, given, torch.ones(3).double().to(me.device))
    return y, [module.weight.grad is None, bool((module.weight == 1).all())]


@chapter.should(
    "ddp/functional-call",
    "torch.func.functional_call on the wrapper computes with the tensors that it is given and "
    "leaves the parameters' gradients alone.",
    source="torch 2.13, test_stateless_api_with_ddp",
    needs="dtype:float64",
)
@world_sizes(2)
def test_functional_call(ranks: Ranks) -> None:
    for rank, (y, untouched) in enumerate(ranks.run(call_functionally)):
        assert_that(y.item() == 3 * (2 + rank), f"the result is {y.item()}", rank)
        assert_that(untouched == [True, True], "gradient or parameter was touched", rank)


class MakesTensors(nn.Module):
    """Returns a mask without a gradient and a running sum that it began itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 2).double()

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        total = torch.zeros(2, dtype=x.dtype, device=x.device)
        total = total + self.layer(x).sum(0)
        return total, {"mask": (total > 0).double(), "given": x.detach()}


@chapter.must(
    "ddp/tensors-made-in-forward",
    "A module may return tensors that need no gradient and tensors that it made itself.",
    source="torch 2.13, test_ddp_new_tensor_in_fwd and test_ddp_returns_tensor_with_no_grad; "
    "pytorch#60882",
    rests_on="ddp/average",
)
@world_sizes(2)
@pytest.mark.parametrize(
    "options", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str
)
def test_tensors_made_in_forward(ranks: Ranks, options: Options) -> None:
    train(ranks, Recipe(MakesTensors), batches(2, 3, (2, WIDTH)), options)


def gradient_if_made_without_grad(me: Me) -> Tensor | None:
    with torch.no_grad():
        model = me.ddp(Scaled("float64").to(me.device))
    model(torch.full((3,), 1.0 + 2 * me.rank, dtype=torch.float64, device=me.device)).backward()
    grad: Tensor | None = model.module.weight.grad
    return grad


@chapter.must(
    "ddp/constructed-without-grad-mode",
    "A wrapper that was made under no_grad still averages gradients.",
    source="torch 2.13, Reducer's constructor enables grad mode",
    rests_on="ddp/average",
)
@world_sizes(2)
def test_construction_without_grad_mode(ranks: Ranks) -> None:
    want = torch.full((3,), 2.0, dtype=torch.float64)
    assert_same_on_all_ranks(ranks.run(gradient_if_made_without_grad), want, what="gradient")


def gradient_after_conversion(me: Me) -> str | Tensor:
    """The gradient, or the words of the error."""
    module = Scaled("float32").to(me.device)
    model = me.ddp(module)
    x = torch.full((3,), 1.0 + 2 * me.rank, device=me.device)
    model(x).backward()
    module.double()
    module.float()
    module.zero_grad()
    try:
        model(x).backward()
    except RuntimeError as error:
        return str(error)
    assert module.weight.grad is not None
    return module.weight.grad


@chapter.should(
    "ddp/converted-module",
    "After the wrapped module was converted to another dtype and back, gradients are averaged "
    "or the step is refused; they never silently stay local.",
    source="pytorch#104336",
    rests_on="ddp/average",
)
@world_sizes(2)
def test_a_module_that_was_converted_after_wrapping(ranks: Ranks) -> None:
    for rank, got in enumerate(ranks.run(gradient_after_conversion)):
        if isinstance(got, Tensor):
            assert_that(bool((got == 2).all()), f"gradient {got.tolist()}, not averaged", rank)
