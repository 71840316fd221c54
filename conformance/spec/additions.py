"""A layer that a program adds to a model after it was wrapped, and before the first forward."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from conformance import Me
from conformance.spec.facts import unlike


class Growing(nn.Module):
    """The gradient of the added weight is the input."""

    added: nn.Linear

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = (self.first(x) + self.added(x)).sum()
        return total


def silently_local(me: Me, wrap: Callable[[nn.Module], Any]) -> list[str]:
    """The gradient of the added layer, if it is this rank's own, and nothing was said of it."""
    module = Growing().to(me.device)
    model = wrap(module)
    module.added = nn.Linear(4, 1, bias=False, device=me.device)
    x = torch.full((1, 4), 1.0 + 2 * me.rank, device=me.device)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            model(x).backward()
        except (RuntimeError, ValueError):
            return []
    if any("added.weight" in str(warning.message) for warning in said):
        return []
    grad = module.added.weight.grad
    if isinstance(grad, DTensor):
        grad = grad.full_tensor()
    return unlike("gradient of a layer that was added, silently", grad, torch.full((1, 4), 2.0))
