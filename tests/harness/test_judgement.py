"""How a case ended becomes its verdict; without ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis.errors import FlakyStrategyDefinition

from conformance import CheckFailed
from conformance.catalogue.rules import catalogue
from conformance.harness.failure import RanksFailed
from conformance.harness.outcome import Died, Outcome, Raised, Refusal, Returned, StillRunning
from conformance.run.judgement import LEAVES_NOTHING_BEHIND, LeftBehind, judge_end, verdict_of
from conformance.run.plan import Plan
from conformance.target import Deviation, Target
from conformance.verdict import Verdict

TARGET = Target(name="x", backend="x")
WAITING = StillRunning("", "", False)
REFUSED: list[Outcome] = [Raised("NotImplementedError", "no", "")] * 2


def plan(*covers: str, **given: Any) -> Plan:
    words: dict[str, Any] = {"own": (), "lacks": (), "lacks_part": False, "probed": True}
    return Plan(covers=covers or ("a/b",), **{**words, "depth": 0, "gpus": 0, **given})


def deviating(*requirements: str, expects: Verdict = Verdict.BROKEN) -> Target:
    deviation = Deviation(requirements, "known", expects=expects)
    return Target(name="x", backend="x", deviations=(deviation,))


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (None, Verdict.HOLDS),
        (CheckFailed("no"), Verdict.BROKEN),
        (AssertionError("no"), Verdict.BROKEN),
        (pytest.fail.Exception("no"), Verdict.BROKEN),
        (RanksFailed("f", REFUSED), Verdict.BROKEN),
        (RanksFailed("f", [Died(0)]), Verdict.CRASHED),
        (RanksFailed("f", [StillRunning("", "", False)]), Verdict.TIMEOUT),
        (pytest.skip.Exception("no GPU"), Verdict.NOT_EXERCISED),
        (IndexError("a bug of the case"), Verdict.UNKNOWN),
    ],
)
def test_the_end_of_a_case_gives_its_verdict(error: BaseException | None, verdict: Verdict) -> None:
    judged = judge_end(error, plan("a/b", "a/c"), TARGET)
    assert judged.verdicts == {"a/b": verdict, "a/c": verdict}
    assert judged.worked is (error is None)
    assert not judged.excused


class Several(Exception):
    """As Python's ExceptionGroup, which 3.10 does not have and Hypothesis brings along."""

    def __init__(self, *exceptions: BaseException) -> None:
        self.exceptions = exceptions


def test_of_several_errors_the_worst_counts() -> None:
    assert verdict_of(Several(CheckFailed("no"), RanksFailed("f", [Died(1)]))) is Verdict.CRASHED
    assert verdict_of(Several(CheckFailed("no"), KeyError("k"))) is Verdict.UNKNOWN


def test_what_was_found_and_not_found_again_by_hypothesis_was_found() -> None:
    flaky = FlakyStrategyDefinition("other examples the second time")
    assert verdict_of(Several(CheckFailed("no"), flaky)) is Verdict.BROKEN
    assert verdict_of(flaky) is Verdict.BROKEN


@pytest.mark.parametrize(
    ("error", "refusal", "verdict"),
    [
        (None, "", Verdict.NOT_CLAIMED),
        (None, "rank 0: send raised", Verdict.NOT_CLAIMED),
        (RanksFailed("f", REFUSED), "rank 0 raised", Verdict.NOT_CLAIMED),
        (RanksFailed("f", [*REFUSED, Returned(1)]), "rank 0 raised", Verdict.NOT_CLAIMED),
        (RanksFailed("f", [*REFUSED, WAITING]), "rank 0 raised", Verdict.NOT_CLAIMED),
        (CheckFailed("its words"), "rank 1: send raised", Verdict.NOT_CLAIMED),
        (RanksFailed("f", [*REFUSED, Died(1)]), "", Verdict.CRASHED),
        (RanksFailed("f", [WAITING] * 2), "", Verdict.TIMEOUT),
        (CheckFailed("wrong data"), "", Verdict.BROKEN),
        (IndexError("a bug of the case"), "rank 1: send raised", Verdict.UNKNOWN),
    ],
)
def test_a_probe_must_work_or_be_refused(
    error: BaseException | None, refusal: str, verdict: Verdict
) -> None:
    refusals = [Refusal(refusal)] if refusal else []
    judged = judge_end(error, plan(lacks=("op:send",)), TARGET, "", refusals)
    assert judged.verdicts == {"a/b": verdict}
    assert judged.excused is (error is not None and verdict is Verdict.NOT_CLAIMED)
    assert judged.worked is (error is None and not refusal)


def test_what_is_claimed_is_not_excused_by_a_refusal() -> None:
    refused = [Refusal("rank 0 raised", needs=("dtype:int64", "op:send"))]
    judged = judge_end(RanksFailed("f", REFUSED), plan(), TARGET, "", refused)
    assert judged.verdicts == {"a/b": Verdict.BROKEN}


def test_a_call_that_asks_for_what_is_not_claimed_may_be_refused() -> None:
    without_send = replace(TARGET, capabilities=TARGET.capabilities.without(["op:send"]))
    consequence = Refusal("rank 0: all_reduce raised", needs=("op:all_reduce",))
    refusals = [consequence, Refusal("rank 1: send raised", needs=("dtype:int64", "op:send"))]
    for error in (RanksFailed("f", REFUSED), CheckFailed("its words")):
        judged = judge_end(error, plan(), without_send, "", refusals)
        assert judged.verdicts == {"a/b": Verdict.NOT_CLAIMED}
        assert judged.reason == "refused: rank 1: send raised"
        assert judge_end(error, plan(), without_send, "", [consequence]).verdicts == {
            "a/b": Verdict.BROKEN
        }


def test_a_declared_failure_is_excused_if_it_fails_as_declared() -> None:
    failed = RanksFailed("f", [Died(1)])
    excused = judge_end(failed, plan(), deviating("a/*", expects=Verdict.CRASHED))
    assert excused.verdicts == {"a/b": Verdict.DEVIATION}
    assert excused.excused
    assert excused.reason == "known"
    other = judge_end(failed, plan(), deviating("a/*", expects=Verdict.TIMEOUT))
    assert other.verdicts == {"a/b": Verdict.CRASHED}
    assert not other.excused


def test_a_case_that_covers_more_than_is_excused_fails() -> None:
    judged = judge_end(CheckFailed("no"), plan("a/b", "c/d"), deviating("a/*"))
    assert judged.verdicts == {"a/b": Verdict.DEVIATION, "c/d": Verdict.BROKEN}
    assert not judged.excused
    assert judged.reason == "no", "what excuses a/b is no reason for c/d"


def test_what_ranks_leave_behind_breaks_its_own_requirement() -> None:
    assert LEAVES_NOTHING_BEHIND in catalogue()
    left = LeftBehind("rank 0 left behind: thread 'x'\nrank 1 left behind: thread 'x'")
    judged = judge_end(left, plan(), TARGET)
    assert judged.verdicts == {LEAVES_NOTHING_BEHIND: Verdict.BROKEN}
    assert judged.reason == "rank 0 left behind: thread 'x'"
    assert judge_end(left, plan(), deviating("groups/*")).excused


def test_what_a_test_without_requirements_leaves_behind_is_not_held_against_the_target() -> None:
    left = LeftBehind("rank 0 left behind: thread 'x'")
    assert judge_end(left, replace(plan(), covers=()), TARGET).verdicts == {}


def test_a_rank_that_hangs_or_dies_while_leaving_is_judged_by_that() -> None:
    left = LeftBehind("rank 1 left behind: it did not return", Verdict.TIMEOUT)
    assert judge_end(left, plan(), TARGET).verdicts == {LEAVES_NOTHING_BEHIND: Verdict.TIMEOUT}
