"""Helpers that mutants of several chapters of sync_batchnorm share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar
from unittest import mock

from torch import Tensor

from impl.sync_batchnorm import SyncBatchNorm, normalise
from impl.sync_batchnorm.normalise import Exchange, GroupExchange
from tests.mutants.wrappers import LayerMutant


class Wrong(GroupExchange):
    """An exchange of which a mutant overrides one way."""


class ExchangeMutant(LayerMutant, SyncBatchNorm):
    """A layer that is right but for its exchange."""

    exchange: ClassVar[type[GroupExchange]] = GroupExchange

    def _exchange(self) -> Exchange | None:
        right = super()._exchange()
        if not isinstance(right, GroupExchange):
            return right
        return self.exchange(right.group, right.world_size)


Normalise: Any = normalise._Normalise


Gradients = tuple[Any, ...]  # of input, weight and bias, and of what has none


@contextmanager
def backward_as(change: Callable[[Any, Gradients], Gradients]) -> Iterator[None]:
    """While this lasts, the layer's gradients are what `change` makes of the right ones."""
    right = Normalise.backward

    def backward(ctx: Any, grad_output: Tensor) -> Gradients:
        return change(ctx, right(ctx, grad_output))

    with mock.patch.object(Normalise, "backward", staticmethod(backward)):
        yield
