"""Measures whether memory grows from one training step to the next."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from conformance import Me, assert_that
from conformance.spec.retention import in_use

_GRADIENT_MIB = 4
_FIRST_STEPS = 12  # allocators take their time
_MEASURED_STEPS = 32
_GRADIENTS_MAX = _MEASURED_STEPS / 2


def growth(me: Me, wrapped: Callable[[nn.Module], Any]) -> float:
    """How much memory grows in some steps of one layer, after the first: in sizes of a gradient.

    wrapped: makes of the layer what trains it.
    """
    width = round((_GRADIENT_MIB * 2**18) ** 0.5)
    model = wrapped(nn.Linear(width, width, bias=False).to(me.device))
    x = torch.ones(1, width, device=me.device)

    def steps(count: int) -> int:
        for _ in range(count):
            model(x).sum().backward()
            model.zero_grad()
        gc.collect()
        return in_use(me.device)

    before = steps(_FIRST_STEPS)
    return (steps(_MEASURED_STEPS) - before) / (_GRADIENT_MIB * 2**20)


def assert_steady(found: Sequence[float]) -> None:
    """On no rank do steps leave as much as half of their gradients."""
    for rank, grown in enumerate(found):
        said = (
            f"{_MEASURED_STEPS} steps have left memory of {grown:.1f} gradients on rank {rank}; "
            f"it may be less than {_GRADIENTS_MAX:.0f}"
        )
        assert_that(grown < _GRADIENTS_MAX, said, rank)
