"""Measures whether a DDP wrapper is freed after training, and whether its memory use grows."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import pytest
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from conformance import Me
from conformance.spec.ddp.models import WIDTH, Perceptron, Recipe, loss_of, normal
from conformance.spec.ddp.training_runs import Options
from conformance.spec.growth import growth
from conformance.spec.waiting import wait_until_freed

_OPTIONS: list[Options] = [
    {},
    {"gradient_as_bucket_view": True},
    {"find_unused_parameters": True},
    {"static_graph": True},
]
every_option = pytest.mark.parametrize("options", _OPTIONS, ids=str)


def let_go(me: Me, options: Options, hooked: bool = False, raises: bool = False) -> list[str]:
    """What still exists of a wrapper that has trained, after the last reference is dropped.

    raises: the last forward pass raised.
    """
    module = Recipe(Perceptron)().to(me.device)
    model = me.ddp(module, **options)
    if hooked:
        model.register_comm_hook(None, allreduce_hook)
    for i in range(3):
        loss_of(model(normal((2, WIDTH), i).to(me.device))).backward()
    if raises:
        with contextlib.suppress(RuntimeError):
            model(normal((2, WIDTH + 1), 3).to(me.device))
    held: dict[str, Any] = {"the wrapper": model, "the module": module}
    held |= {f"parameter {name}": param for name, param in module.named_parameters()}
    there = {what: weakref.ref(thing) for what, thing in held.items()}
    del module, model, held
    wait_until_freed(*there.values())
    return [what for what, ref in there.items() if ref() is not None]


def steps_taken(me: Me, options: Options, hooked: bool = False) -> float:
    def wrapped(layer: nn.Module) -> Any:
        model = me.ddp(layer, **options)
        if hooked:
            model.register_comm_hook(None, allreduce_hook)
        return model

    return growth(me, wrapped)
