"""The lines that report a run's progress, from counts alone."""

from __future__ import annotations

import pytest

from conformance.report.progress import Progress, about
from conformance.report.results import CaseResult
from conformance.verdict import Verdict


def ended(
    case: str, *broken: str, reason: str = "rank 0 is wrong", size: int | None = 2
) -> CaseResult:
    verdicts = dict.fromkeys(broken, Verdict.BROKEN)
    return CaseResult(case, verdicts, Verdict.BROKEN, 0.1, size, reason)


def test_a_rule_is_done_when_all_its_cases_are() -> None:
    progress = Progress({"a": ["c/one"], "b": ["c/one", "c/two"], "c": ["c/three"]})
    assert progress.line(0) == "0 of 3 rules done, 0 failed"
    progress.case_done("a")
    progress.case_done("a")
    assert progress.line(0) == "0 of 3 rules done, 0 failed"
    progress.case_done("b")
    progress.case_done("a case that was not planned")
    assert progress.line(0) == "2 of 3 rules done, 0 failed"


def test_the_time_that_is_left_is_that_of_the_cases_at_their_rate_so_far() -> None:
    progress = Progress({str(n): [f"c/{n}"] for n in range(2000)})
    for n in range(500):
        progress.case_done(str(n))
    assert progress.line(4) == "500 of 2,000 rules done, 0 failed", "too soon to tell"
    assert progress.line(60) == "500 of 2,000 rules done, 0 failed, about 3 min left"
    for n in range(500, 2000):
        progress.case_done(str(n))
    assert progress.line(240) == "2,000 of 2,000 rules done, 0 failed"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.1, "10 s"), (44, "40 s"), (56, "1 min"), (200, "3 min")]
)
def test_a_guess_is_not_exact(seconds: float, text: str) -> None:
    assert about(seconds) == text


def test_a_failure_names_the_rules_and_how_the_case_ran() -> None:
    progress = Progress({})
    told = progress.failure(ended("x.py::test_y[ws2-float32]", "all_reduce/sum"))
    assert told == "broken: all_reduce/sum (2 ranks, float32): rank 0 is wrong"
    told = progress.failure(ended("x.py::test_y", "c/one", "c/two", "c/three", size=None))
    assert told == "broken: c/one, c/two and 1 more: rank 0 is wrong"
    assert progress.line(0).endswith(", 4 failed")


def test_a_rule_is_told_once_and_a_reason_three_times() -> None:
    progress = Progress({})
    assert progress.failure(ended("x", "c/one")) != ""
    assert progress.failure(ended("y", "c/one")) == ""
    told = [progress.failure(ended("z", f"d/{n}", reason="lost")) != "" for n in range(5)]
    assert told == [True, True, True, False, False]
    assert progress.failure(ended("z", "e/one", reason="another")) != ""
    assert progress.line(0).endswith(", 7 failed")


def test_what_is_no_failure_is_not_told() -> None:
    progress = Progress({"x": ["c/one"]})
    for verdict in set(Verdict) - {Verdict.BROKEN, Verdict.TIMEOUT, Verdict.CRASHED}:
        result = CaseResult("x", {"c/one": verdict}, verdict, 0.1, 2, "why")
        assert (progress.failure(result) != "") is (verdict is Verdict.UNKNOWN)
