"""Mutants of conformance/spec/ddp/programs.py: features that work alone, and not together."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from impl.ddp.iteration.reducer import Reducer
from tests.mutants.ddp.kit import DDPMutant, afterwards
from tests.mutants.kit import breaks


def _halve_gradients(module: nn.Module, *_: Any, **__: Any) -> None:
    for param in module.parameters():
        if param.grad is not None:
            param.grad = param.grad * 0.5


@breaks("ddp/any-order", says=r"gradient of .* is wrong")
class LoadingScalesGradientsThatAreKept(DDPMutant):
    """Loading a state dict halves gradients that were not cleared."""

    patched = afterwards(nn.Module, "load_state_dict", _halve_gradients)


_frozen_before: WeakKeyDictionary[Reducer, set[int]] = WeakKeyDictionary()


def _clear_what_thawed(reducer: Reducer, *_: Any) -> None:
    frozen = {i for i, param in enumerate(reducer.params) if not param.requires_grad}
    for index in _frozen_before.get(reducer, set()) - frozen:
        grad = reducer.params[index].grad
        if grad is not None:
            grad.zero_()
    _frozen_before[reducer] = frozen


@breaks("ddp/any-order", says=r"gradient of .* is wrong")
class ThawedParametersBeginAtZero(DDPMutant):
    """A gradient that was kept while its parameter was frozen is lost when that ends."""

    patched = afterwards(Reducer, "prepare_for_backward", _clear_what_thawed)
