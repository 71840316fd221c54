"""Mutants of conformance/spec/fsdp/separate_programs.py."""

from __future__ import annotations

from typing import Any

from impl.fsdp.checkpoint import optim_save
from tests.mutants.fsdp.kit import Swapped
from tests.mutants.kit import breaks


def _in_the_order_of_a_set(right: Any) -> Any:
    def wrong(*args: Any, **kwargs: Any) -> Any:
        keys, own = right(*args, **kwargs)
        return list(set(keys)), own

    return wrong


@breaks("fsdp/separate-programs", says=r"the program of rank|is wrong")
class GathersStatesInTheOrderOfASet(Swapped):
    """Each rank gathers the optimizer's state of parameters in the order of a set of names."""

    swaps = ((optim_save, "agree_on_keys", _in_the_order_of_a_set),)
