"""Modules whose layers share parameters, on every device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


class Tied(nn.Module):
    """Its layers share parameters, also after `to(device)`.

    Where a tensor of the host cannot take the data of one of the device, torch makes new ones, one
    for each layer.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = [(m, name, p) for m in self.modules() for name, p in m._parameters.items()]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch says no types of it
        moved: dict[int, nn.Parameter | None] = {}
        for module, name, parameter in before:
            made = moved.setdefault(id(parameter), module._parameters[name])
            module._parameters[name] = made
        return self
