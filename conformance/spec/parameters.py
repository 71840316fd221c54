"""Pytest parameters that need a capability (dtype, op or reduce op), which a target must claim."""

from __future__ import annotations

from typing import Any

import pytest

from conformance import needs


def dtypes(*names: str) -> list[Any]:
    """As parameters, each of which needs its own dtype, such as "uint16"."""
    return _each("dtype", names)


def ops(*names: str) -> list[Any]:
    """As parameters, each of which needs its own operation, such as "all_to_all"."""
    return _each("op", names)


def reduce_ops(*names: str) -> list[Any]:
    """As parameters, each of which needs its own reduce op, such as "avg"."""
    return _each("reduce_op", names)


def by_operation(*rules: pytest.MarkDecorator) -> list[Any]:
    """As parameters, one for each rule: the operation that its id begins with.

    rules: what `must`, `should` or `may` of a chapter give.
    """
    return [pytest.param(rule.args[0].id.partition("/")[0], marks=rule) for rule in rules]


def _each(kind: str, names: tuple[str, ...]) -> list[Any]:
    return [pytest.param(name, marks=needs(f"{kind}:{name}")) for name in names]
