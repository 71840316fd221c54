"""DDP with optimizers in backward or sharded, with a replaced process group, and under torch.func;
its type and the signature of its constructor."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from conformance import Chapter, Me, Ranks, assert_same_on_all_ranks, assert_that, world_sizes
from conformance.spec.ddp.models import WIDTH, Branching, Perceptron, Recipe, loss_of, normal
from conformance.spec.ddp.optimizers import (
    ZeroRedundancyOptimizer,
    apply_optimizer_in_backward,
)
from conformance.spec.ddp.training_runs import Options, assert_grads
from conformance.target import resolve

OBSERVED = "observed, torch 2.13.0"

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
@world_sizes(2)
@pytest.mark.parametrize("way", ["in backward, early", "in backward"], ids=["before", "after"])
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


# ---- another group


def regrouped(me: Me, fail_first: bool, options: Options) -> list[Tensor]:
    """Gradients of one branch in groups of one rank each, then in the default group."""
    alone = [dist.new_group([r]) for r in range(me.world_size)][me.rank]
    module = Recipe(Branching, (2,))(seed=0).to(me.device)
    model = me.ddp(module, **options)
    grads = []
    for group in (alone, dist.group.WORLD):
        if fail_first:
            model.zero_grad()
            loss_of(model(normal((2, WIDTH), me.rank).to(me.device), [0])).backward()
        model._update_process_group(group)
        for _ in range(3):
            model.zero_grad()
            loss_of(model(normal((2, WIDTH), me.rank).to(me.device), [0, 1])).backward()
        grad = module.get_parameter("branches.1.weight").grad
        assert grad is not None
        grads.append(grad.clone())
    return grads


def assert_regrouped(ranks: Ranks, *, fail_first: bool, **options: Any) -> None:
    got = ranks.run(regrouped, fail_first, options)
    wants = []
    for r in range(2):
        module = Recipe(Branching, (2,))()
        loss_of(module(normal((2, WIDTH), r), [0, 1])).backward()
        grad = module.get_parameter("branches.1.weight").grad
        assert grad is not None
        wants.append(grad)
    for rank, (alone, _) in enumerate(got):
        assert_grads([alone], wants[rank], f"rank {rank}'s gradient in a group of its own")
    assert_grads([both for _, both in got], (wants[0] + wants[1]) / 2, "gradient in both's group")


@chapter.should(
    "ddp/update-group/average",
    "After _update_process_group gradients are averaged over the new group.",
    source="torch 2.13, test_ddp_update_process_group_new_group and _default_group",
    rests_on="ddp/process-group",
)
@world_sizes(2)
def test_another_group(ranks: Ranks) -> None:
    assert_regrouped(ranks, fail_first=False)


@chapter.should(
    "ddp/update-group/static-graph",
    "After _update_process_group, gradients of a static graph are averaged over the new group, "
    "also if the graph was recorded in another group.",
    source=f"{OBSERVED}: reset_state keeps which parameters the static graph uses",
    rests_on=("ddp/update-group/average", "ddp/static-graph/values"),
)
@world_sizes(2)
def test_another_group_for_a_static_graph(ranks: Ranks) -> None:
    assert_regrouped(ranks, fail_first=False, static_graph=True)


@chapter.should(
    "ddp/update-group/after-an-unfinished-step",
    "_update_process_group makes training possible again after a step that was not finished.",
    source="torch 2.13, test_ddp_update_process_group_no_find_unused",
    rests_on="ddp/update-group/average",
)
@world_sizes(2)
def test_another_group_after_an_unfinished_step(ranks: Ranks) -> None:
    assert_regrouped(ranks, fail_first=True)


class RaisingBackward(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Any:
        raise ArithmeticError("refused by backward")


def go_on_after_an_error(me: Me, options: Options) -> list[Any]:
    """Gradients, or None, after each of some steps that do not use the last branch. Before them, a
    backward pass that used all branches raised on every rank."""
    module = Recipe(Branching)(seed=me.rank).to(me.device)
    model = me.ddp(module, find_unused_parameters=True, **options)
    refused: Any = RaisingBackward.apply
    with contextlib.suppress(ArithmeticError):
        x = normal((2, WIDTH), me.rank).to(me.device).requires_grad_()
        loss_of(model(refused(x), [0, 1, 2])).backward()
    model._update_process_group(dist.new_group(list(range(me.world_size))))
    seen = []
    for i in range(3):
        model.zero_grad()
        loss_of(model(normal((2, WIDTH), 10 * i + me.rank).to(me.device), [0, 1])).backward()
        seen.append([None if p.grad is None else p.grad.clone() for p in module.parameters()])
    return seen


@chapter.should(
    "ddp/update-group/after-an-error-in-backward",
    "_update_process_group makes training possible again after a backward pass that raised while "
    "gradients were being reduced, and parameters that this pass used no longer count as used.",
    source="pytorch#128092",
    rests_on=("ddp/update-group/average", "ddp/unused/everywhere"),
)
@world_sizes(2)
@pytest.mark.parametrize("view", [False, True], ids=["apart", "view"])
def test_another_group_after_an_error(ranks: Ranks, view: bool) -> None:
    module = Recipe(Branching)()
    for _ in range(5):  # what is still under way may be quick, or not
        got = ranks.run(go_on_after_an_error, {"gradient_as_bucket_view": view})
        for i in range(3):
            module.zero_grad()
            for rank in range(2):
                (loss_of(module(normal((2, WIDTH), 10 * i + rank), [0, 1])) / 2).backward()
            for j, param in enumerate(module.parameters()):
                grads = [steps[i][j] for steps in got]
                assert_grads(grads, param.grad, f"gradient {j} in step {i + 1}")


# ---- transforms of torch.func


def transform(me: Me) -> tuple[dict[str, bool], list[list[Tensor]]]:
    """Which transforms of the wrapper equal the module's; the gradients of steps around them."""
    module = Recipe(Perceptron)(seed=0).to(me.device)
    plain = copy.deepcopy(module)
    model = me.ddp(module)
    x = normal((3, WIDTH), 0).to(me.device)
    own = {name: p.detach() for name, p in model.named_parameters()}
    steps, agree = [], {}

    def step(seed: int) -> None:
        model.zero_grad()
        loss_of(model(normal((2, WIDTH), seed).to(me.device))).backward()
        steps.append([p.grad.clone() for p in module.parameters() if p.grad is not None])

    def of(f: Any, params: dict[str, Tensor], x: Tensor) -> Tensor:
        y: Tensor = torch.func.functional_call(f, params, (x,))
        return y.square().sum()

    for i in range(2):
        step(10 * i + me.rank)
    with_prefix, without = own, {k.removeprefix("module."): v for k, v in own.items()}
    ways: dict[str, Callable[[Any, dict[str, Tensor]], Tensor]] = {
        "grad": lambda f, params: torch.func.grad(of, argnums=2)(f, params, x),
        "grad by sample": lambda f, params: torch.func.vmap(
            lambda row: torch.stack(
                [g.sum() for g in torch.func.grad(of, argnums=1)(f, params, row).values()]
            )
        )(x),
        "jvp": lambda f, params: torch.stack(torch.func.jvp(f, (x,), (x,))),
        "vmap": lambda f, params: torch.func.vmap(f)(x),
    }
    for name, of_both in ways.items():
        got, want = of_both(model, with_prefix), of_both(plain, without)
        agree[name] = torch.allclose(got, want, rtol=1e-9, atol=1e-12)
    step(20 + me.rank)
    return agree, steps


@chapter.should(
    "ddp/functional-transforms",
    "torch.func's grad, jvp and vmap of the wrapper give the same results as those of the "
    "module, and steps before and after them average gradients.",
    source="torch 2.13, prepare_for_backward looks at no parameter's graph unless it searches",
    rests_on=("ddp/functional-call", "ddp/average"),
)
@world_sizes(2)
def test_transforms(ranks: Ranks) -> None:
    got = ranks.run(transform)
    for rank, (agree, _) in enumerate(got):
        for name, same in agree.items():
            assert_that(same, f"{name} of the wrapper is not that of the module", rank)
    for i in range(3):
        module = Recipe(Perceptron)(seed=0)
        for rank in range(ranks.world_size):
            loss = loss_of(module(normal((2, WIDTH), 10 * i + rank)))
            (loss / ranks.world_size).backward()
        for k, param in enumerate(module.parameters()):
            grads = [steps[i][k] for _, steps in got]
            assert_grads(grads, param.grad, f"gradient {k} in step {i + 1}")


# ---- what it is


def looks(me: Me) -> list[bool]:
    model = me.ddp(Recipe(Perceptron)().to(me.device), bucket_cap_mb=2)
    return [
        isinstance(model, nn.Module),
        isinstance(model, TorchDDP),
        model.device == next(model.parameters()).device,
        model.process_group == dist.group.WORLD,
        model.bucket_bytes_cap == 2 * 2**20,
        model.require_backward_grad_sync is True,
    ]


@chapter.must(
    "ddp/is-a-module",
    "The wrapper is an nn.Module that torch's code takes for a DistributedDataParallel, with "
    "its attributes device, process_group, bucket_bytes_cap and require_backward_grad_sync.",
    source="optimizers, Join and FSDP ask isinstance and these names",
    needs="dtype:float64",
)
@world_sizes(2)
def test_what_a_wrapper_is(ranks: Ranks) -> None:
    assert_same_on_all_ranks(ranks.run(looks), [True] * 6, what="what it is")


def arguments_of(me: Me) -> list[str]:
    parameters = inspect.signature(resolve(me.target.ddp)).parameters.values()
    return [f"{p.name}={p.default}" for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]


@chapter.should(
    "ddp/signature",
    "The constructor takes torch's arguments by their names, with torch's defaults.",
    source="torch 2.13, DistributedDataParallel.__init__",
)
@world_sizes(1)
def test_the_signature(ranks: Ranks) -> None:
    [got] = ranks.run(arguments_of)
    parameters = inspect.signature(TorchDDP).parameters.values()
    want = [f"{p.name}={p.default}" for p in parameters]
    missing = [argument for argument in want if argument not in got]
    assert_that(not missing, f"missing or with another default: {', '.join(missing)}")
