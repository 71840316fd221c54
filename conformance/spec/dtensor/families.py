"""All families of operators, and the check of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from conformance import Me, Ranks, assert_that
from conformance.spec.dtensor import tables
from conformance.spec.dtensor.arithmetic import ARITHMETIC
from conformance.spec.dtensor.moves import MOVES

FAMILIES = ARITHMETIC | MOVES


def outcomes(me: Me, family: str, way: str, sizes: Sequence[int]) -> list[Any]:
    return tables.outcomes(me, FAMILIES[family], way, sizes)


def check_family(
    ranks: Ranks, family: str, way: str = "results", sizes: Sequence[int] = ()
) -> None:
    """No operator gives other numbers than on plain tensors, and some layouts are taken."""
    got = ranks.run(outcomes, family, way, sizes)
    found, taken = tables.wrong_in(FAMILIES[family], got, way, sizes or (ranks.world_size,))
    first = "\n".join(found[:8])
    assert_that(not found, f"wrong in {len(found)} layouts:\n{first}")
    assert_that(taken > 0, "every layout is refused")
