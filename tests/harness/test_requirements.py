"""Requirements and the catalogue of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from conformance.catalogue.rules import catalogue
from conformance.rule import MAY, MUST, Catalogue, Requirement, UnknownRequirement


def requirement(id: str, **given: Any) -> Requirement:
    words = {"level": MUST, "profile": "groups", "says": "It holds.", "source": "a test"}
    return Requirement(id=id, **{**words, **given})


CHAIN = Catalogue(
    [
        requirement("a/leaf", rests_on=("a/middle", "b/root")),
        requirement("a/middle", rests_on=("a/root",)),
        requirement("a/root"),
        requirement("b/root"),
    ]
)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"id": "AllReduce/sum"}, "is not of the form"),
        ({"id": "sum"}, "is not of the form"),
        ({"profile": "other"}, "no profile 'other'"),
        ({"says": "no full stop"}, "a sentence with a source"),
        ({"source": ""}, "a sentence with a source"),
    ],
)
def test_a_requirement_is_a_sentence_with_a_source(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        requirement(**{"id": "a/b", **wrong})


def test_a_requirement_travels_as_plain_data() -> None:
    one = requirement("a/b", level=MAY, needs=("op:send",), rests_on=("a/c",))
    assert Requirement.from_plain(json.loads(json.dumps(one.to_plain()))) == one


def test_roots_are_told_nearest_first() -> None:
    assert CHAIN.roots("a/leaf") == ["a/middle", "b/root", "a/root"]
    assert [CHAIN.depth(id) for id in CHAIN] == [2, 1, 0, 0]


def test_patterns_and_profiles_select() -> None:
    assert [r.id for r in CHAIN.matching("*/root")] == ["a/root", "b/root"]
    assert len(CHAIN.of_profile("groups")) == 4
    assert CHAIN.of_profile("p2p") == []


def test_a_name_that_is_nearly_right_gets_a_hint() -> None:
    with pytest.raises(UnknownRequirement, match="did you mean a/middle"):
        CHAIN["a/midle"]
    with pytest.raises(UnknownRequirement, match=r"no requirement matches 'zzz'$"):
        CHAIN.matching("zzz")


def test_two_requirements_cannot_share_a_name() -> None:
    CHAIN.add(requirement("b/root"))
    with pytest.raises(ValueError, match="two requirements are called 'b/root'"):
        CHAIN.add(requirement("b/root", says="Something else."))


def test_the_catalogue_is_read_once() -> None:
    assert catalogue() is catalogue()
    assert len(catalogue()) >= 150
