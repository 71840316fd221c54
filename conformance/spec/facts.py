"""Tables of rules whose case is one function of a rank, which tells what is wrong there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from conformance import Me, Ranks, assert_that
from conformance.checks import first_difference
from conformance.oracle.near import Near
from conformance.spec.tolerance import difference

# What a rank finds wrong, one text each; nothing if all is right.
Fact = Callable[[Me], list[str]]


def rows(*pairs: tuple[pytest.MarkDecorator, Any]) -> list[Any]:
    """As parameters: what each rule is about, with the rule as mark and the end of its id as id."""
    return [
        pytest.param(about, marks=rule, id=rule.args[0].id.partition("/")[2])
        for rule, about in pairs
    ]


def unlike(what: str, got: object, want: object) -> list[str]:
    """What is found if one is not the other, bit for bit."""
    found = first_difference(got, want)
    return [f"{what}: {found}"] if found else []


def near(what: str, got: Tensor, want: Tensor, within: float = 1e-5) -> list[str]:
    """What is found if one is not the other, within this share of the largest number."""
    found = difference(got.detach().cpu(), Near.relative(want.detach().cpu(), within))
    return [f"{what}: {found}"] if found else []


def check_fact(ranks: Ranks, fact: Callable[..., list[str]], *args: object) -> None:
    """No rank finds anything wrong. args: of the fact, besides the rank's `Me`."""
    for rank, found in enumerate(ranks.run(fact, *args)):
        assert_that(not found, "\n".join(found), rank)


def refusal(call: Callable[[], object], *kinds: type[Exception]) -> str:
    """What the call says when it raises one of these; what happened instead, in parentheses."""
    try:
        value = call()
    except kinds as error:
        return str(error)
    except Exception as error:
        return f"({type(error).__name__}: {error})"
    return f"(nothing was raised, it returned {type(value).__name__})"
