"""Mutants of conformance/spec/fully_shard/separate_programs.py."""

from __future__ import annotations

from typing import Any

from impl.fully_shard import api
from tests.mutants.fsdp.kit import Swapped
from tests.mutants.kit import breaks


def _in_the_order_of_a_set(right: Any) -> Any:
    def wrong(*args: Any) -> Any:
        params = right(*args)
        shapes = list({str(tuple(param.shape)) for param in params})
        return sorted(params, key=lambda param: shapes.index(str(tuple(param.shape))))

    return wrong


@breaks("fully_shard/separate-programs", says=r"the program of rank|is wrong")
class ParametersOfAUnitAreInTheOrderOfASet(Swapped):
    """Parameters of a unit come in the order of a set of their shapes as text."""

    swaps = ((api, "managed_parameters", _in_the_order_of_a_set),)
