"""Optimizer step hook that notifies handles whose unsharded copy of parameters may be outdated."""

from __future__ import annotations

import weakref
from typing import Protocol

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook


class KeepsCopy(Protocol):
    """Something that keeps an unsharded copy of parameters."""

    def note_step(self, stepped: set[int]) -> None:
        """An optimizer with the parameters of these `id`s has stepped."""


class OptimizerSteps:
    """Notifies handles that keep unsharded copies of every optimizer step.

    Tensor versions would not do: fused optimizers do not raise them, and a rank that holds no part
    of a parameter does not step it, whereas the answer must be the same on every rank: it decides
    whether all of them take part in a gather. An optimizer has the same parameters on every rank.
    """

    def __init__(self) -> None:
        self._watching: weakref.WeakSet[KeepsCopy] = weakref.WeakSet()
        self._is_registered = False

    def watch(self, keeper: KeepsCopy) -> None:
        """Register the hook only when it is needed, not when this package is imported."""
        self._watching.add(keeper)
        if not self._is_registered:
            self._is_registered = True
            register_optimizer_step_post_hook(self._on_step)

    def forget(self, keeper: KeepsCopy) -> None:
        self._watching.discard(keeper)

    def _on_step(self, optimizer: Optimizer, *_: object) -> None:
        if not self._watching:  # as in most training loops: the backward has freed everything
            return
        stepped = {id(param) for group in optimizer.param_groups for param in group["params"]}
        for keeper in self._watching:
            keeper.note_step(stepped)


optimizer_steps = OptimizerSteps()
