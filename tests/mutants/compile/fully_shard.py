"""Mutants of conformance/spec/compile/fully_shard.py."""

from __future__ import annotations

from typing import Any

from tests.mutants.kit import breaks
from tests.mutants.replacing import MethodMutant


class ModuleMutant(MethodMutant):
    of = "torch.nn:Module"


@breaks("compile/fully_shard/trained", says="is wrong")
class CompiledModulesGiveTwiceTheirOutput(ModuleMutant):
    @staticmethod
    def compile(right: Any, self: Any, **how: Any) -> None:
        right(self, **how)
        once = self._compiled_call_impl
        self._compiled_call_impl = lambda *args: once(*args) * 2


@breaks("compile/fully_shard/calls", says="compiled: the traces part")
@breaks("compile/fully_shard/mixed-precision", says="compiled: the traces part")
class CompiledModulesRunTwice(ModuleMutant):
    @staticmethod
    def compile(right: Any, self: Any, **how: Any) -> None:
        right(self, **how)
        once = self._compiled_call_impl
        self._compiled_call_impl = lambda *args: once(once(*args))
