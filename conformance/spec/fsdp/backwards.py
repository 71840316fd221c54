"""Several FSDP backward passes in a step: several forwards, a retained graph, late zero_grad."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from conformance import Chapter, Ranks, world_sizes
from conformance.spec.fsdp.custom import check_custom, inputs, train_custom, train_custom_whole
from conformance.spec.fsdp.small_models import three_layers
from conformance.spec.fsdp.training_runs import STRATEGIES, both_kinds, check_runs

chapter = Chapter("fsdp")


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


@chapter.should(
    "fsdp/several-backwards",
    "Two forwards, followed by a backward through each, give the gradients of both.",
    source="pytorch#136861 and pytorch#106637; what the bare module does",
)
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


@chapter.should(
    "fsdp/retained-graph",
    "A second backward through a retained graph adds its gradients again.",
    source="torch 2.13 docs, Tensor.backward: retain_graph; what the bare module does",
)
@world_sizes(2)
@both_kinds
def test_a_graph_that_is_retained(ranks: Ranks, orig: bool) -> None:
    for strategy in STRATEGIES:
        check_custom(ranks, three_layers, one_graph_twice, strategy, orig)


def second_batch(
    model: Any, rank: int, step: int, device: torch.device, scale: float
) -> list[Tensor]:
    loss = loss_of(model, rank, 2 * step + 1, device)
    (scale * loss).backward()
    return [loss]


def cleared_late(
    model: Any, rank: int, step: int, device: torch.device, scale: float
) -> list[Tensor]:
    """Two batches, of which the first one's gradients are cleared after the second forward."""
    params = list(model.parameters())  # an optimizer's: what a model shows in between may differ
    loss_of(model, rank, 2 * step, device).backward()
    loss = loss_of(model, rank, 2 * step + 1, device)
    for param in params:
        if step % 2 == 0 or param.grad is None:
            param.grad = None
        else:
            param.grad.zero_()
    (scale * loss).backward()
    return [loss]


def cleared_late_by_the_model(
    model: Any, rank: int, step: int, device: torch.device, scale: float
) -> list[Tensor]:
    loss_of(model, rank, 2 * step, device).backward()
    loss = loss_of(model, rank, 2 * step + 1, device)
    model.zero_grad(set_to_none=step % 2 == 0)
    (scale * loss).backward()
    return [loss]


@chapter.should(
    "fsdp/cleared-before-backward",
    "Gradients that the optimizer or the model clears between a forward and its backward, to "
    "None or to zeros, do not enter the sum.",
    source="torch 2.13 docs, zero_grad; what the bare module does",
)
@world_sizes(2)
@both_kinds
def test_gradients_that_are_cleared_late(ranks: Ranks, orig: bool) -> None:
    want = train_custom_whole(three_layers, second_batch, ranks.world_size)
    for strategy in STRATEGIES:
        for passes in (cleared_late, cleared_late_by_the_model):
            check_runs(ranks.run(train_custom, three_layers, passes, strategy, orig), want)
