"""The expected result of data parallel training: the same steps in one process, on all batches.

The gradient of a data parallel step is the mean over the ranks of each rank's gradient, so one
process gets it by going backward through the mean of the ranks' losses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

LEARNING_RATE = 0.1
MOMENTUM = 0.9

Loss = Callable[[Any], Tensor]


@dataclass(frozen=True, slots=True)
class Step:
    """What a model is like after a step, by name of the parameter.

    grads: None where there is none.
    """

    grads: dict[str, Tensor | None]
    params: dict[str, Tensor]


def snapshot(module: nn.Module) -> Step:
    """Copies of a module's gradients and parameters."""
    named = list(module.named_parameters())
    return Step(
        {name: None if p.grad is None else p.grad.detach().clone() for name, p in named},
        {name: p.detach().clone() for name, p in named},
    )


def optimizer_for(module: nn.Module) -> torch.optim.Optimizer:
    """One with momentum, so that a wrong gradient is seen in all later steps as well."""
    return torch.optim.SGD(module.parameters(), LEARNING_RATE, MOMENTUM)


def train_whole(
    module: nn.Module, steps: Sequence[Sequence[Sequence[Any]]], loss: Loss, divisor: int = 0
) -> list[Step]:
    """Train on what all ranks have.

    steps: for each step the arguments of each rank; several calls a rank may follow each other.
    divisor: by what the sum of the losses is divided, the number of ranks by default.
    """
    optimizer = optimizer_for(module)
    done = []
    for calls in steps:
        optimizer.zero_grad()
        for args in calls:
            (loss(module(*args)) / (divisor or len(calls))).backward()
        optimizer.step()
        done.append(snapshot(module))
    return done
