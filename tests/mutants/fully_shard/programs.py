"""Mutants of conformance/spec/fully_shard/programs.py."""

from __future__ import annotations

from typing import Any

from impl.fully_shard.unit import Unit
from tests.mutants.fsdp.kit import Swapped
from tests.mutants.kit import breaks


def _some(right: Any) -> Any:
    def wrong(self: Any) -> None:
        if self.after_forward is None:
            right(self)
            return
        for parameter in self.parameters[1:]:
            parameter.accumulated = None
            if parameter.unsharded is not None and not self.reduces_gradients:
                parameter.unsharded.grad = None
        right(self)

    return wrong


@breaks("fully_shard/any-program", says="step .: params of")
class KeepsOneGradientOfAnAccumulation(Swapped):
    """Of units that are freed after the forward: the first parameter alone accumulates."""

    swaps = ((Unit, "end_backward", _some),)
