"""What changed between two certificates, and what counts as a regression."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from conformance.report.compare import Kind, compare
from conformance.verdict import Verdict
from tests.report.samples import case, certificate

H, B, D, N, A = (
    Verdict.HOLDS,
    Verdict.BROKEN,
    Verdict.DEVIATION,
    Verdict.NOT_CLAIMED,
    Verdict.NOT_EXERCISED,
)


def one(verdict: Verdict) -> dict[str, Any]:
    return certificate(case("test_two", "c/two", verdict, reason=f"because {verdict}"))


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        (H, B, Kind.REGRESSION),
        (H, Verdict.TIMEOUT, Kind.REGRESSION),
        (H, Verdict.UNKNOWN, Kind.REGRESSION),
        (H, D, Kind.REGRESSION),
        (H, N, Kind.REGRESSION),
        (N, D, Kind.REGRESSION),
        (D, B, Kind.REGRESSION),
        (B, Verdict.CRASHED, Kind.STILL_FAILING),
        (B, H, Kind.IMPROVEMENT),
        (B, D, Kind.IMPROVEMENT),
        (D, H, Kind.IMPROVEMENT),
        (N, H, Kind.IMPROVEMENT),
        (H, A, Kind.NO_LONGER_EXERCISED),
        (A, B, Kind.NEWLY_EXERCISED),
    ],
)
def test_a_change_of_verdict_has_a_meaning(before: Verdict, after: Verdict, kind: Kind) -> None:
    comparison = compare(one(before), one(after))
    [change] = [c for c in comparison.changes if c.requirement == "c/two"]
    assert (change.kind, change.before, change.after) == (kind, before.value, after.value)
    assert change.reason == f"because {after}"
    assert comparison.has_regressions is (kind is Kind.REGRESSION)


def test_regressions_come_first() -> None:
    before = certificate(
        case("test_one", "c/one", B), case("test_two", "c/two"), case("test_root", "a/root")
    )
    after = certificate(
        case("test_one", "c/one"), case("test_two", "c/two", B), case("test_leaf", "a/leaf")
    )
    kinds = [change.kind for change in compare(before, after).changes]
    assert kinds == [
        Kind.REGRESSION,
        Kind.NO_LONGER_EXERCISED,
        Kind.IMPROVEMENT,
        Kind.NEWLY_EXERCISED,
    ]


def test_requirements_may_come_and_go() -> None:
    before, after = one(H), one(H)
    gone = next(r for r in before["requirements"] if r["id"] == "c/two")
    after["requirements"] = [r for r in after["requirements"] if r["id"] != "c/two"]
    [change] = compare(before, after).changes
    assert (change.kind, change.after) == (Kind.NO_LONGER_EXERCISED, "")
    [change] = compare(after, before).changes
    assert (change.kind, change.before) == (Kind.NEWLY_EXERCISED, "")
    assert gone["verdict"] == "holds"


def test_circumstances_that_changed_are_told() -> None:
    before = one(H)
    after = copy.deepcopy(before)
    assert compare(before, after).changes == ()
    assert compare(before, after).circumstances == {}
    after["environment"]["torch"] = "9.9"
    after["target"]["versions"]["sample"] = "1.3"
    after["run"]["selected"]["profiles"] = ["p2p"]
    assert compare(before, after).circumstances == {
        "sample": ("1.2", "1.3"),
        "torch": (before["environment"]["torch"], "9.9"),
        "selected profiles": ("everything", "['p2p']"),
    }


def test_cases_that_were_left_out_are_told_though_no_verdict_changed() -> None:
    two = case("test_two", "c/two")
    before = certificate(two)
    after = certificate(two, planned={"x.py::test_more": ["c/two"]}, files_left_out=["y.py"])
    comparison = compare(before, after)
    [change] = comparison.changes
    assert (change.kind, change.requirement) == (Kind.EXERCISED_LESS, "c/two")
    assert change.reason == "1 of its cases did not run"
    assert comparison.circumstances == {
        "cases left out": ("0", "1"),
        "files left out": ("0", "1"),
    }
    assert not comparison.has_regressions
    assert compare(after, before).changes == ()
