"""Layers whose weights are ones, so that outputs and gradients can be told by counting."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from conformance import Me
from conformance.spec.facts import unlike
from conformance.spec.fully_shard.recipes import local, mesh_of

WIDTH = 3


def ones(me: Me, inputs: int = WIDTH, outputs: int = WIDTH, dtype: Any = None) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False, device=me.device, dtype=dtype)
    nn.init.ones_(layer.weight)
    return layer


def batch(me: Me, factor: float = 1.0) -> Tensor:
    """(1, WIDTH), the same on all ranks."""
    return torch.full((1, WIDTH), factor, device=me.device)


def shard_of(me: Me, module: nn.Module, **kwargs: Any) -> Any:
    return me.fully_shard(module, mesh=mesh_of(me), **kwargs)


def unlike_gradient(name: str, layer: Any, value: float | None) -> list[str]:
    """Each element of the layer's weight has this gradient; None: there is none."""
    gradient = layer.weight.grad
    if gradient is None or value is None:
        return unlike(f"gradient of {name}", gradient, value)
    mine = local(gradient).cpu()
    return unlike(f"gradient of {name}", mine, torch.full_like(mine, value))


def is_sharded(module: nn.Module) -> list[bool]:
    return [isinstance(parameter, DTensor) for parameter in module.parameters()]
