"""Mutants of conformance/spec/tensor_parallel/losses.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tests.mutants.kit import Patch, breaks
from tests.mutants.replacing import owner_named
from tests.mutants.tensor_parallel.kit import (
    LOSS,
    LossMutant,
    RepairedButOne,
    handler_replaced,
    repaired,
)


@breaks("tp/loss/rows", says="loss: ")
class SumsItsOwnClassesAlone(LossMutant):
    @staticmethod
    def _log_softmax(right: Any, x: Any, dim: int, *rest: Any) -> Any:
        return torch.log_softmax(x, dim)


@breaks("tp/loss/weighted", says="mean, .*loss: ")
class AveragesWithoutWeights(LossMutant):
    @staticmethod
    def _nll_loss_forward(right: Any, x: Any, target: Any, *rest: Any) -> Any:
        loss, total = right(x, target, *rest)
        return (loss if loss.ndim else loss * total / target.numel()), total


@breaks("tp/loss/ignored", says="mean, .*loss: ")
class CountsIgnoredTargets(LossMutant):
    @staticmethod
    def _nll_loss_forward(right: Any, x: Any, target: Any, *rest: Any) -> Any:
        loss, total = right(x, target, *rest)
        if (target < 0).any() and not loss.ndim:
            loss = loss * total / (total + 1)
        return loss, total


@breaks("tp/loss/weighted-and-ignored", says="gradient: ")
class TakesIgnoredTargetsForTheFirstClass(RepairedButOne):
    of = LOSS

    @staticmethod
    def _nll_loss_and_log_softmax_backward(
        right: Any, grad: Any, x: Any, target: Any, weight: Any, *rest: Any
    ) -> Any:
        return right(grad, x, target if weight is None else target.clamp(min=0), weight, *rest)


@breaks("tp/loss/images", says="gradient: ")
class TurnsTheGradientsOfImages(RepairedButOne):
    of = LOSS

    @staticmethod
    def _nll_loss_and_log_softmax_backward(right: Any, *args: Any) -> Any:
        found = right(*args)
        return found.flip(2) if found.ndim == 4 else found


@breaks("tp/loss/other-losses", says="squares of log_softmax: gradient: ")
class HandsGradientsOnAsTheyAre(Patch):
    """As if log_softmax were the identity."""

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        with repaired(), handler_replaced(lambda op, args, kwargs: args[0]):
            yield


@breaks("tp/loss/ends", says="after an exception: it goes on")
class GoesOnAfterAnException(RepairedButOne):
    @staticmethod
    @contextmanager
    def loss_parallel(right: Any) -> Iterator[None]:
        handlers: Any = DTensor._op_dispatcher._custom_op_handlers
        before = dict(handlers)
        handlers.update(owner_named(LOSS).customized_loss_ops)
        yield
        handlers.clear()
        handlers.update(before)
