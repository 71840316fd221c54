"""Tables of rules whose case is one function of a rank, which tells what is wrong there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from conformance import Me, Ranks, assert_that
from conformance.checks import first_difference

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


def check_fact(ranks: Ranks, fact: Callable[..., list[str]], *args: object) -> None:
    """No rank finds anything wrong. args: of the fact, besides the rank's `Me`."""
    for rank, found in enumerate(ranks.run(fact, *args)):
        assert_that(not found, "\n".join(found), rank)
