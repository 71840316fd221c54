"""`ci/repeat`: which runs it makes, and what it calls different."""

from __future__ import annotations

import pytest

from ci.repeat import differences, verdicts_of, ways
from conformance.catalogue.chapters import PACKAGE

pytest_plugins = ["pytester"]


def test_every_way_is_made_once_and_half_of_the_random_ones_are_loaded() -> None:
    made = list(ways(orders=2, workers=[1, 8], times=4, first_seed=11))
    assert [way.order_seed for way in made[:2]] == [1, 2]
    assert [way.workers for way in made[2:4]] == [1, 8]
    assert [way.seed for way in made[4:]] == [11, 12, 13, 14]
    assert [way.is_loaded for way in made[4:]] == [False, True, False, True]
    assert len({way.name for way in made}) == 8


def test_a_verdict_of_one_case_is_a_difference_although_the_requirement_has_the_same() -> None:
    def certificate(second: str) -> dict[str, object]:
        cases = [{"case": "a[ws1]", "verdict": "holds"}, {"case": "a[ws2]", "verdict": second}]
        return {"requirements": [{"id": "a/b", "verdict": "holds", "cases": cases}]}

    same, other = verdicts_of(certificate("holds")), verdicts_of(certificate("not claimed"))
    assert differences(same, same) == []
    assert list(map(str, differences(same, other))) == ["a/b a[ws2]: holds -> not claimed"]


def test_what_breaks_as_declared_in_one_run_alone_is_chance() -> None:
    first = {("a", ""): "deviation", ("a", "x"): "deviation", ("a", "y"): "holds"}
    other = {("a", ""): "holds", ("a", "x"): "holds", ("a", "y"): "holds"}
    assert [each.is_by_chance for each in differences(first, other)] == [True, True]
    [crash] = differences(first, {**first, ("a", "y"): "crashed"})
    assert not crash.is_by_chance


def test_a_case_that_did_not_run_is_a_difference() -> None:
    assert list(map(str, differences({("a", ""): "holds"}, {}))) == ["a : holds -> absent"]


def test_an_order_is_another_one_and_the_same_for_the_same_seed(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(PACKAGE.parent))
    pytester.makepyfile("".join(f"def test_{n}(): pass\n" for n in range(20)))

    def order(*options: str) -> list[str]:
        options = ("-p", "ci.random_order", "-p", "no:xdist", "--collect-only", "-q", *options)
        return [line for line in pytester.runpytest_subprocess(*options).outlines if "::" in line]

    plain, one, again, other = (
        order(),
        order("--order-seed=1"),
        order("--order-seed=1"),
        order("--order-seed=2"),
    )
    assert one == again
    assert sorted(one) == sorted(other) == sorted(plain)
    assert plain != one != other
