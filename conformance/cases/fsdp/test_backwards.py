"""Several backward passes in an iteration."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conformance import Ranks, covers, world_sizes
from conformance.cases.fsdp.custom import Unit, check_custom, inputs, linear
from conformance.cases.fsdp.training import STRATEGIES

both_kinds = pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig"])


def three_layers(unit: Unit) -> Any:
    return unit(nn.Sequential(unit(linear(3, 3, 1)), linear(3, 3, 2), unit(linear(3, 2, 3))))


def loss_of(model: Any, rank: int, number: int, device: torch.device) -> Tensor:
    loss: Tensor = model(inputs(rank, number).to(device)).pow(2).sum()
    return loss


def forwards_first(
    model: Any, rank: int, step: int, device: torch.device, scale: float
) -> list[Tensor]:
    """As one trains a discriminator: on what is real, and on what is not."""
    losses = [loss_of(model, rank, 2 * step + i, device) for i in range(2)]
    for loss in losses:
        (scale * loss).backward()
    return losses


@covers("fsdp/several-backwards")
@world_sizes(2, 3)
@both_kinds
def test_a_backward_of_each_forward(ranks: Ranks, orig: bool) -> None:
    for strategy in STRATEGIES:
        check_custom(ranks, three_layers, forwards_first, strategy, orig)


def one_graph_twice(
    model: Any, rank: int, step: int, device: torch.device, scale: float
) -> list[Tensor]:
    loss = loss_of(model, rank, step, device)
    (scale * loss).backward(retain_graph=True)
    (scale * loss).backward()
    return [loss]


@covers("fsdp/retained-graph")
@world_sizes(2)
@both_kinds
def test_a_graph_that_is_retained(ranks: Ranks, orig: bool) -> None:
    for strategy in STRATEGIES:
        check_custom(ranks, three_layers, one_graph_twice, strategy, orig)
