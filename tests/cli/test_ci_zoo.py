"""`ci/zoo`: what it checks of each backend, and what it shows of a certificate."""

from __future__ import annotations

from typing import Any

from ci.zoo import first_sentence, objections, row
from conformance.report.certificate import counted
from conformance.target import load_target


def certificate(verdict: str = "holds", **more: Any) -> dict[str, Any]:
    found = {"id": "all_reduce/sum", "verdict": verdict, "reason": "rank 1 is wrong"}
    plain: dict[str, Any] = {
        "under_claims": [],
        "deviations": [],
        "harness_faults": [],
        "blames": [],
    }
    counts = counted([verdict])
    return {"requirements": [found], "counts": counts, "target": {"name": "x"}, **plain, **more}


def test_nothing_is_held_against_what_holds_or_is_not_claimed_or_deviates() -> None:
    for verdict in ("holds", "not claimed", "deviation", "not exercised"):
        assert list(objections(certificate(verdict))) == []


def test_a_failure_and_what_hides_one_are_objections() -> None:
    for verdict in ("broken", "timeout", "crashed", "blocked", "unknown"):
        assert list(objections(certificate(verdict))) == [
            f"{verdict}: all_reduce/sum: rank 1 is wrong"
        ]


def test_a_claim_too_few_or_a_deviation_too_many_is_an_objection() -> None:
    assert list(objections(certificate(under_claims=["op:send"]))) == [
        "works although not claimed: op:send"
    ]
    own = {"of_torch": False, "needless": ["all_reduce/sum"], "reason": "its own"}
    of_torch = {**own, "of_torch": True}
    inherited = {**own, "reason": load_target("torch").deviations[0].reason}
    assert list(objections(certificate(deviations=[own, of_torch, inherited]))) == [
        "holds although a deviation is declared: all_reduce/sum"
    ]
    assert list(objections(certificate(harness_faults=["no store"]))) == ["harness fault: no store"]


def test_the_first_sentence_and_the_counts_are_shown() -> None:
    broken = certificate("broken", blames=["send hangs", "recv hangs"])
    assert first_sentence(broken) == "send hangs"
    assert first_sentence(certificate()) == "nothing is wrong"
    assert row(broken, 2.04, "words").split() == ["x", "0", "0", "0", "1", "2.0", "words"]
