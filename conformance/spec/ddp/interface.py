"""The DDP wrapper's type, attributes and constructor signature, and torch.func on it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from conformance import Chapter, Me, Ranks, assert_same_on_all_ranks, assert_that, world_sizes
from conformance.spec.ddp.models import WIDTH, Perceptron, Recipe, loss_of, normal
from conformance.spec.ddp.training_runs import assert_grads
from conformance.spec.signatures import arguments_of, assert_takes
from conformance.target import resolve

chapter = Chapter("ddp")


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


def takes(me: Me) -> list[str]:
    return arguments_of(resolve(me.target.ddp))


@chapter.should(
    "ddp/signature",
    "The constructor takes torch's arguments by their names, in their order, with torch's "
    "defaults.",
    source="torch 2.13, DistributedDataParallel.__init__",
)
@world_sizes(1)
def test_the_signature(ranks: Ranks) -> None:
    [got] = ranks.run(takes)
    assert_takes(got, arguments_of(TorchDDP))
