"""Mutants of conformance/spec/dtensor/in_programs.py."""

from __future__ import annotations

from typing import Any

from tests.mutants.dtensor.kit import (
    FRONT,
    FrontMutant,
    OperatorMutant,
    spoiled,
)
from tests.mutants.kit import breaks
from tests.mutants.replacing import MethodMutant


@breaks("dtensor/factories/values", says="full, .*local: ")
class FillsWithAnotherValue(FrontMutant):
    @staticmethod
    def full(right: Any, size: Any, value: Any, **how: Any) -> Any:
        return right(size, value + 1, **how)


@breaks("dtensor/copies", says="copy: local: ")
class ClonesShareMemory(OperatorMutant):
    ops = ("clone",)

    @staticmethod
    def wrong(right: Any, x: Any, **_: Any) -> Any:
        return x


@breaks("dtensor/saved", says="loaded: local: ")
class LoadsZeros(MethodMutant):
    of = "torch"

    @staticmethod
    def load(right: Any, *args: Any, **how: Any) -> Any:
        return right(*args, **how) * 0


@breaks("dtensor/numbers", says="numbers: ")
class RanksReadOtherNumbers(OperatorMutant):
    ops = ("_local_scalar_dense",)

    @staticmethod
    def wrong(right: Any, x: Any) -> Any:
        return right(spoiled(x))


@breaks("dtensor/numbers-of-sums", says="numbers: ")
class ReadsItsOwnShare(OperatorMutant):
    """As torch does."""

    ops = ()


@breaks("dtensor/modules/parameters", says="placement: ")
class DistributesNoParameters(FrontMutant):
    @staticmethod
    def distribute_module(right: Any, module: Any, mesh: Any, _: Any, *rest: Any) -> Any:
        return right(module, mesh, None, *rest)


@breaks("dtensor/modules/parameters", says="1.bias: is trained: got True, want False")
class ThawsParameters(FrontMutant):
    @staticmethod
    def distribute_module(right: Any, *args: Any) -> Any:
        found = right(*args)
        for param in found.parameters():
            param.requires_grad_()
        return found


@breaks("dtensor/modules/inputs-and-outputs", says="output: ")
class LeavesOutputsAsTheyAre(FrontMutant):
    @staticmethod
    def distribute_module(right: Any, module: Any, mesh: Any, *functions: Any) -> Any:
        return right(module, mesh, *functions[:2])


@breaks("dtensor/local-map", says="elements differ")
class CallsAnotherFunction(MethodMutant):
    of = f"{FRONT}.experimental"

    @staticmethod
    def local_map(right: Any, function: Any, *args: Any, **how: Any) -> Any:
        return right(lambda x, y: function(x, y) + 1, *args, **how)
