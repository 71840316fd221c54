"""DDP inside the transforms of `torch.func`, which hide the graph and wrap every tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.impl.ddp.models import DDP, TwoLayers, grad_of
from tests.impl.ddp.ranks import Ranks

OPTIONS: list[dict[str, Any]] = [
    {},
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"gradient_as_bucket_view": True},
]


def step(wrapped: Any, rank: int) -> Tensor:
    """The gradient that one training step leaves to the first layer."""
    wrapped.zero_grad()
    wrapped(torch.full((1, 2), 1.0 + rank)).sum().backward()
    return grad_of(wrapped.module.first.weight).clone()


def transforms_at(rank: int, options: dict[str, Any], steps_before: int) -> list[Tensor]:
    """Gradients of steps, after some steps and each of three transforms."""
    torch.manual_seed(0)
    wrapped = DDP(TwoLayers(), **options)
    x = torch.ones(1, 2)
    for _ in range(steps_before):
        step(wrapped, rank)
    plain = TwoLayers()
    plain.load_state_dict(wrapped.module.state_dict())
    seen = []
    transforms: list[Callable[[Any], Tensor]] = [
        lambda f: torch.func.grad(lambda y: f(y).sum())(x),
        lambda f: torch.func.jvp(f, (x,), (x,))[1],
        lambda f: torch.func.vmap(f)(x),
    ]
    for of in transforms:
        torch.testing.assert_close(of(wrapped), of(plain))
        seen.append(step(wrapped, rank))
    return seen


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
@pytest.mark.parametrize("steps_before", [0, 1, 2])
def test_steps_average_after_transforms(
    two_ranks: Ranks, options: dict[str, Any], steps_before: int
) -> None:
    """Buckets may be due to be rebuilt when a transform comes: their memory must be plain."""
    got = two_ranks.run(transforms_at, options, steps_before)
    torch.manual_seed(0)
    module = TwoLayers()
    for rank in range(2):
        (module(torch.full((1, 2), 1.0 + rank)).sum() / 2).backward()
    for seen in got:
        for grad in seen:
            torch.testing.assert_close(grad, grad_of(module.first.weight))


def backward_from_outside(rank: int, options: dict[str, Any]) -> list[Tensor]:
    layer = nn.Linear(2, 1, bias=False)
    wrapped = DDP(layer, **options)
    seen = []
    for _ in range(3):
        wrapped.zero_grad()
        x = torch.full((1, 2), 1.0 + rank)
        torch.func.jvp(wrapped, (x,), (x,))[1].sum().backward()
        seen.append(grad_of(layer.weight).clone())
        wrapped.zero_grad()
        torch.func.vmap(wrapped)(x).sum().backward()
        seen.append(grad_of(layer.weight).clone())
    return seen


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
def test_what_leaves_a_transform_is_averaged(two_ranks: Ranks, options: dict[str, Any]) -> None:
    for seen in two_ranks.run(backward_from_outside, options):
        for grad in seen:
            torch.testing.assert_close(grad, torch.full((1, 2), 1.5))


def buffers_in(rank: int) -> Tensor:
    module = nn.Linear(2, 1, bias=False)
    level = torch.zeros(1)
    module.register_buffer("level", level)
    wrapped = DDP(module)
    level.fill_(rank + 5.0)
    torch.func.grad(lambda y: wrapped(y).sum())(torch.ones(1, 2))
    return level


def test_buffers_are_synchronised_in_a_transform(two_ranks: Ranks) -> None:
    assert two_ranks.run(buffers_in) == [torch.tensor([5.0])] * 2
