"""Broken requirements grouped by cause, in the summary."""

from __future__ import annotations

from typing import Any

from conformance.report.case_failure import Failure, cause_of
from conformance.report.causes import causes_of
from conformance.report.results import CaseResult, judge
from conformance.report.terminal import summary_lines
from conformance.rule import Catalogue
from conformance.target import Target
from conformance.verdict import Verdict
from tests.report.samples import case, requirement

MANY = Catalogue(
    [
        *(requirement(f"many/r{n}") for n in range(30)),
        requirement("root/one"),
        *(requirement(f"leaf/r{n}", rests_on=("root/one",)) for n in range(40)),
        *(requirement(f"other/r{n}") for n in range(15)),
    ]
)


def failed(id: str, cause: str, **more: Any) -> CaseResult:
    name = id.replace("/", "_")
    return case(
        f"test_{name}",
        id,
        Verdict.BROKEN,
        reason=cause,
        failure=Failure("the report", cause=cause),
        **more,
    )


def test_the_cause_that_holds_up_most_comes_first_and_output_is_bounded() -> None:
    cases = [failed(f"many/r{n}", "TypeError: no device_mesh") for n in range(30)]
    cases += [failed("root/one", "CheckFailed: rank N is wrong (root)")]
    cases += [case(f"test_leaf{n}", f"leaf/r{n}", Verdict.BLOCKED) for n in range(40)]
    cases += [failed(f"other/r{n}", f"ValueError: {'x' * (n + 1)}") for n in range(15)]
    run = judge(MANY, Target("sample", "gloo"), cases, {})
    first, second, *others = causes_of(run)
    assert (first.text, first.weight) == ("CheckFailed: rank N is wrong (root)", 41)
    assert (second.text, len(second.cases)) == ("TypeError: no device_mesh", 30)
    assert len(others) == 15
    lines = list(summary_lines(run, 1.0, width=100))
    text = "\n".join(lines)
    assert (
        "1 requirement, 1 case: CheckFailed: rank N is wrong (root); fix this first: unblocks 40 "
        "requirements" in " ".join(lines)
    )
    assert "30 requirements, 30 cases: TypeError: no device_mesh\n" in text
    assert text.count("no device_mesh") == 4  # the heading and three of thirty
    assert "    and 15 more requirements\n" in text
    assert "and 7 more causes (7 requirements); the certificate has them all" in text


def test_of_a_drawn_call_the_cause_is_the_operation() -> None:
    def cause(shape: str, reduce_op: str) -> str:
        call = f"Call(op='reduce', shape={shape}, dtype='int8', reduce_op='{reduce_op}', root=0)"
        return cause_of(AssertionError(f"{call}: rank 0 is wrong"), "shapes/any")

    assert cause("(1, 2)", "max") == cause("(7,)", "max") != cause("(7,)", "min")
