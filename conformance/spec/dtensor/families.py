"""All families of operators, and the check of one."""

from __future__ import annotations

from typing import Any

from conformance import Me, Ranks, assert_that
from conformance.spec.dtensor import tables
from conformance.spec.dtensor.arithmetic import ARITHMETIC
from conformance.spec.dtensor.moves import MOVES

FAMILIES = ARITHMETIC | MOVES


def outcomes(me: Me, family: str, way: str) -> list[Any]:
    return tables.outcomes(me, FAMILIES[family], way)


def check_family(ranks: Ranks, family: str, way: str = "results") -> None:
    """No operator gives other numbers than on plain tensors, and some layouts are taken."""
    found, taken = tables.wrong_in(FAMILIES[family], ranks.run(outcomes, family, way), way)
    first = "\n".join(found[:8])
    assert_that(not found, f"wrong in {len(found)} layouts:\n{first}")
    assert_that(taken > 0, "every layout is refused")
