"""Models of two or three FSDP units, the passes of a step, and the expected results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from conformance.spec.fsdp.custom import Unit, inputs, linear, train_custom_whole
from conformance.spec.fsdp.training_runs import Run


def two_layers(unit: Unit) -> Any:
    return unit(nn.Sequential(unit(linear(3, 3, 1)), unit(linear(3, 2, 2))))


def two_layers_from(first: nn.Linear) -> Callable[[Unit], Any]:
    """`two_layers`, of which `first` is the first one."""

    def make(unit: Unit) -> Any:
        first.double().load_state_dict(linear(3, 3, 1).state_dict())
        return unit(nn.Sequential(unit(first), unit(linear(3, 2, 2))))

    return make


def three_layers(unit: Unit) -> Any:
    return unit(nn.Sequential(unit(linear(3, 3, 1)), linear(3, 3, 2), unit(linear(3, 2, 3))))


def one_pass(model: Any, rank: int, step: int, device: torch.device, scale: float) -> list[Tensor]:
    loss = model(inputs(rank, step).to(device)).pow(2).sum()
    (scale * loss).backward()
    return [loss]


def wanted_of_part(part: list[int]) -> list[Run]:
    """The bare module's training on the batches of some ranks."""

    def passes(
        model: Any, rank: int, step: int, device: torch.device, scale: float
    ) -> list[Tensor]:
        return one_pass(model, part[rank], step, device, scale)

    return train_custom_whole(two_layers, passes, len(part))


class Branches(nn.Module):
    """Two units whose outputs are both returned."""

    def __init__(self, first: Any, second: Any) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.last = linear(3, 2, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.last(self.first(x)), self.second(x)


def branches(unit: Unit) -> Any:
    return unit(Branches(unit(linear(3, 3, 1)), unit(linear(3, 4, 2))))


def loss_of_one_branch(
    model: Any, rank: int, step: int, device: torch.device, scale: float
) -> list[Tensor]:
    """The second branch is in the loss of the steps 0 and 2 only."""
    used, optional = model(inputs(rank, step).to(device))
    loss = used.pow(2).sum()
    if step % 2 == 0:
        loss = loss + optional.pow(2).sum()
    (scale * loss).backward()
    return [loss]
