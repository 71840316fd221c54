"""Mutants of conformance/spec/ddp/changed_module.py."""

from __future__ import annotations

from typing import Any

from impl.ddp import parameters
from impl.ddp.parameters import ParameterWatch
from tests.mutants.ddp.kit import DDPMutant, instead, swap
from tests.mutants.kit import breaks


@breaks("ddp/changed/replaced", says="not averaged, silently")
class DoesNotLookAtTheModuleAgain(DDPMutant):
    patched = instead(ParameterWatch, "look", lambda *_: None)


@breaks("ddp/changed/thawed", says="not averaged, silently")
class OverlooksWhatWasFrozen(DDPMutant):
    @staticmethod
    def _also_frozen(right: Any) -> Any:
        return lambda module: [p for _, p in module.named_parameters()]

    patched = swap(parameters, "_trainable", _also_frozen)


@breaks("ddp/changed/added", says="not averaged, silently")
class OverlooksWhatComesLast(DDPMutant):
    @staticmethod
    def _the_first_alone(right: Any) -> Any:
        return lambda module: right(module)[:1]

    patched = swap(parameters, "_trainable", _the_first_alone)
