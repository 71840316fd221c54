"""Facets of one case (operation, dtype, world size, rule), which `report.blame` compares."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest

from conformance.capabilities import DTYPES, OPS, REDUCE_OPS
from conformance.catalogue.rules import catalogue
from conformance.oracle.collectives import Call
from conformance.oracle.programs import Program, Step
from conformance.run.plan import Plan

Facets = tuple[tuple[str, str], ...]

_KNOWN = {
    **dict.fromkeys(OPS, "op"),
    **dict.fromkeys(REDUCE_OPS, "reduce_op"),
    **dict.fromkeys(DTYPES, "dtype"),
}


def facets_of(item: pytest.Item, plan: Plan, smallest: Iterable[object] = ()) -> Facets:
    """Such as ("op", "gather"), ("world size", "2"), ("rule", "gather/async"), sorted.

    Of a case that has a reduce op or a dtype as parameter, those that its rule needs are left out.

    smallest: what Hypothesis drew for the smallest example that fails.
    """
    needed = [need for id in plan.covers for need in catalogue()[id].needs]
    needed += [need for mark in item.iter_markers("needs") for need in mark.args]
    of_parameters = {*_of_parameters(item), *_of_calls(smallest)}
    chosen = {kind for kind, _ in of_parameters} & {"reduce_op", "dtype"}
    kinds_and_names = (need.partition(":")[::2] for need in needed)
    general = {facet for facet in kinds_and_names if facet[0] not in chosen}
    return tuple(sorted({*_of_rules(plan.covers), *general, *of_parameters}))


def _of_calls(drawn: Iterable[object]) -> Iterator[tuple[str, str]]:
    """The operations of drawn calls and programs, and what is not the plainest of them."""
    for one in drawn:
        if isinstance(one, Program):
            yield from _of_calls(one.steps)
        elif isinstance(one, Call | Step):
            yield "op", one.op
            plainest = Call(one.op)
            for kind in ("reduce_op", "dtype"):
                value = getattr(one, kind, getattr(plainest, kind))
                if value != getattr(plainest, kind):
                    yield kind, value


def _of_rules(ids: Iterable[str]) -> Iterator[tuple[str, str]]:
    for id in ids:
        chapter, _, aspect = id.partition("/")
        yield "profile", catalogue()[id].profile
        yield "chapter", chapter
        yield "aspect", aspect
        yield "rule", id
        if chapter in OPS:
            yield "op", chapter


def _of_parameters(item: pytest.Item) -> Iterator[tuple[str, str]]:
    callspec = getattr(item, "callspec", None)
    for name, value in (callspec.params if callspec else {}).items():
        text = str(value) if isinstance(value, str | int) else str(getattr(value, "__name__", ""))
        if name == "world_size":
            yield "world size", text
        elif text.lower() in _KNOWN:
            yield _KNOWN[text.lower()], text.lower()
        elif isinstance(value, str | int):
            yield name, text
