"""Mutants of conformance/spec/compile/sharded_backward.py."""

from __future__ import annotations

from typing import Any

from impl import torch_private
from impl.fully_shard import state
from tests.mutants.kit import breaks
from tests.mutants.replacing import MethodMutant


@breaks("compile/fsdp/compiled-autograd", says="loss after a step: ")
@breaks("compile/ddp/compiled-autograd-refused", says=r"backward with .* said")
class TakesACompiledBackwardForAnother(MethodMutant):
    base = "impl"
    of = torch_private.__name__

    @staticmethod
    def in_compiled_backward(right: Any) -> bool:
        return False


@breaks("compile/fully_shard/compiled-autograd", says="loss after a step: ")
class DoesWithoutTheEndOfACompiledBackward(MethodMutant):
    base = "impl"
    of = state.__name__

    @staticmethod
    def queue_backward_callback(right: Any, callback: Any) -> None:
        if not torch_private.in_compiled_backward():
            right(callback)
