"""Arguments that a constructor takes by name, also those that it passes on to its base class."""

from __future__ import annotations

import inspect
from typing import Any

from conformance.checks import assert_that


def arguments_of(constructor: Any) -> list[str]:
    """`name=default` of each, in order; with **kwargs, those of the next base class follow."""
    found: dict[str, str] = {}
    for make in _constructors(constructor):
        parameters = inspect.signature(make).parameters.values()
        for p in parameters:
            if p.name != "self" and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
                found.setdefault(p.name, f"{p.name}={p.default}")
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return list(found.values())


def _constructors(constructor: Any) -> list[Any]:
    if not isinstance(constructor, type):
        return [constructor]
    return [vars(cls)["__init__"] for cls in constructor.__mro__ if "__init__" in vars(cls)]


def assert_takes(got: list[str], want: list[str]) -> None:
    """`got` has all of `want`, in the same order, perhaps with others between them."""
    missing = [argument for argument in want if argument not in got]
    assert_that(not missing, f"missing or with another default: {', '.join(missing)}")
    order = [argument for argument in got if argument in want]
    assert_that(order == want, f"in another order: {', '.join(order)}")
