"""Collectives by name as parameters of cases, each with the capabilities that it needs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from conformance import needs
from conformance.spec.collectives.strategies import REDUCING
from conformance.target import Target

COALESCED = "coalesced"  # two all_reduces


def needs_of(kind: str) -> tuple[str, ...]:
    if kind == COALESCED:
        return ("feature:coalescing", "op:all_reduce", "reduce_op:sum")
    return (f"op:{kind}", "reduce_op:sum") if kind in REDUCING else (f"op:{kind}",)


def each(kinds: Iterable[str]) -> list[Any]:
    """As parameters, each with what it needs."""
    return [pytest.param(kind, marks=needs(*needs_of(kind))) for kind in kinds]


def claimed(kinds: Iterable[str], target: Target) -> list[str]:
    """Those that the target claims to have."""
    return [kind for kind in kinds if all(map(target.capabilities.has, needs_of(kind)))]
