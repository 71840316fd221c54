"""Verdicts of ranks and of cases, and the sentence about a hang, on handwritten histories."""

from __future__ import annotations

import itertools
import pickle
from dataclasses import replace

import pytest

from conformance.harness.failure import RanksFailed, refusals_of
from conformance.harness.outcome import (
    Died,
    NotAsked,
    NotTold,
    Outcome,
    Raised,
    Refusal,
    Returned,
    StillRunning,
    describe_hang,
    message_of,
    type_name,
    verdict_of,
)
from conformance.verdict import FAILURES, REFUSES_CERTIFICATE, Verdict, worst

RETURNED = Returned(1)
UNMATCHED = Raised("AssertionError", "Regex pattern did not match.\n  Expected regex: 'a'", "")
RAISED = Raised("ValueError", "no\nmore", "Traceback ...", ("ValueError", "Exception"))
DIED = Died(-11)
WAITING = StillRunning("", "all_reduce #3 on group 'default', float32 (5,)", True)
WENT_ON = StillRunning("", "barrier #1 on group '1'", False)
IDLE = StillRunning("", "", False)
CONSEQUENCE = StillRunning("", "barrier #1 on group 'default'", True, after_failure=True)
LOST = NotTold("the value cannot travel")


@pytest.mark.parametrize(
    ("outcomes", "verdict"),
    [
        ([], Verdict.NOT_EXERCISED),
        ([RETURNED, RETURNED], Verdict.HOLDS),
        ([RETURNED, NotAsked(DIED)], Verdict.HOLDS),
        ([RETURNED, RAISED], Verdict.BROKEN),
        ([RAISED, CONSEQUENCE], Verdict.BROKEN),
        ([RAISED, WAITING], Verdict.TIMEOUT),
        ([WAITING, DIED, RAISED], Verdict.CRASHED),
        ([Died(0), RETURNED], Verdict.CRASHED),
        ([DIED, LOST], Verdict.UNKNOWN),
    ],
)
def test_the_worst_rank_decides(outcomes: list[Outcome], verdict: Verdict) -> None:
    assert verdict_of(outcomes) is verdict


@pytest.mark.parametrize(
    ("outcome", "text"),
    [
        (RETURNED, "returned"),
        (NotAsked(DIED), "died: SIGSEGV (nothing was asked of it)"),
        (RAISED, "raised ValueError: no ..."),
        (UNMATCHED, "raised AssertionError: Regex pattern did not match. Expected regex: 'a'"),
        (Raised("ValueError", "", ""), "raised ValueError: "),
        (DIED, "died: SIGSEGV"),
        (Died(-11, "", "send #1 on group '0'", True), "died: SIGSEGV in send #1 on group '0'"),
        (Died(0, "", "send #1 on group '0'"), "died: exit code 0 after send #1 on group '0'"),
        (Raised("E", "no", "", hint="C has no f"), "raised E: no (C has no f)"),
        (Died(0), "died: exit code 0"),
        (Died(-999), "died: signal 999"),
        (WAITING, "waiting in all_reduce #3 on group 'default', float32 (5,) at the deadline"),
        (IDLE, "after no collective yet at the deadline"),
        (
            CONSEQUENCE,
            "waiting in barrier #1 on group 'default' when another rank had failed",
        ),
        (LOST, "harness fault: the value cannot travel"),
    ],
)
def test_an_outcome_is_told_in_one_line(outcome: Outcome, text: str) -> None:
    assert str(outcome) == text


@pytest.mark.parametrize(
    ("outcomes", "sentence"),
    [
        ([RETURNED, RAISED, DIED], ""),
        (
            [WAITING, WAITING],
            "All ranks waited in all_reduce #3 on group 'default', float32 (5,).",
        ),
        (
            [WAITING, RETURNED, WAITING, WENT_ON],
            "ranks 0 and 2 waited in all_reduce #3 on group 'default', float32 (5,); "
            "rank 3 went on after barrier #1 on group '1' and did not return; rank 1 had returned.",
        ),
        (
            [IDLE, DIED, RAISED, LOST],
            "rank 0 never issued a collective; rank 1 had died; rank 2 had raised; "
            "rank 3 could not be asked.",
        ),
        ([IDLE] * 4, "All ranks never issued a collective."),
    ],
)
def test_a_hang_names_the_ranks_that_differ(outcomes: list[Outcome], sentence: str) -> None:
    assert describe_hang(outcomes) == sentence


REFUSED = Raised("NotImplementedError", "no send", "", ("NotImplementedError",))
ASSERTED = Raised("AssertionError", "", "", ("AssertionError",))


@pytest.mark.parametrize(
    ("outcomes", "refusal"),
    [
        ([REFUSED, REFUSED], "rank 0 raised NotImplementedError: no send"),
        ([RETURNED, REFUSED], "rank 1 raised NotImplementedError: no send"),
        ([WAITING, REFUSED], "rank 1 raised NotImplementedError: no send"),
        ([CONSEQUENCE, REFUSED], "rank 1 raised NotImplementedError: no send"),
        ([ASSERTED, REFUSED], "rank 1 raised NotImplementedError: no send"),
        (
            [WAITING, Returned(1, Refusal("send raised TypeError: no"))],
            "rank 1: send raised TypeError: no",
        ),
        (
            [replace(ASSERTED, refused=Refusal("recv raised TypeError: no"))],
            "rank 0: recv raised TypeError: no",
        ),
        ([RETURNED, RETURNED], ""),
        ([WAITING, WAITING], ""),
        ([ASSERTED, RETURNED], ""),
        ([REFUSED, DIED], ""),
        ([REFUSED, LOST], ""),
    ],
)
def test_a_rank_that_raises_refuses_whatever_becomes_of_the_others(
    outcomes: list[Outcome], refusal: str
) -> None:
    assert next(map(str, refusals_of(outcomes)), "") == refusal


def test_every_rank_that_refuses_is_named_with_what_it_asked_for() -> None:
    of_all, of_call = Refusal(needs=("op:send",)), Refusal("recv raised X", ("op:send",))
    found = refusals_of([replace(REFUSED, refused=of_all), RETURNED, Returned(0, of_call)])
    assert [refusal.needs for refusal in found] == [("op:send",)] * 2
    assert [refusal.said for refusal in found] == [
        "rank 0 raised NotImplementedError: no send",
        "rank 2: recv raised X",
    ]


@pytest.mark.parametrize(
    ("outcomes", "brief"),
    [
        ([RETURNED, RAISED, DIED], "rank 2 died: SIGSEGV"),
        ([RAISED, CONSEQUENCE], "rank 0 raised ValueError: no ..."),
        ([WAITING, RETURNED], describe_hang([WAITING, RETURNED])),
    ],
)
def test_the_worst_is_told_in_brief(outcomes: list[Outcome], brief: str) -> None:
    assert RanksFailed("f", outcomes).brief == brief


def test_failures_travel_between_processes() -> None:
    failure = RanksFailed("f (what it does)", [RETURNED, RAISED, WAITING])
    again = pickle.loads(pickle.dumps(failure))
    assert (again.doing, again.outcomes) == (failure.doing, failure.outcomes)
    assert str(again) == str(failure)
    assert str(failure).startswith("f (what it does): timeout\n  rank 0  returned\n")


def test_exceptions_are_known_by_name() -> None:
    assert RAISED.is_a(ValueError)
    assert not RAISED.is_a(TypeError)
    assert type_name(RanksFailed) == "conformance.harness.failure.RanksFailed"
    assert type_name(KeyError) == "KeyError"


def test_an_exception_whose_own_code_fails_has_a_message() -> None:
    class Text(str):
        pass

    class Odd(Exception):
        def __str__(self) -> str:
            raise SystemExit(self.args[0])

    class Subclassed(Exception):
        def __str__(self) -> str:
            return Text("text")

    assert message_of(ValueError("as it is")) == "as it is"
    assert message_of(Odd(1)) == "<exception str() failed>"
    assert type(message_of(Subclassed())) is str  # another process may not know the class


def test_every_verdict_has_its_place_in_the_order() -> None:
    for one, other in itertools.permutations(Verdict, 2):
        assert worst([one, other]) is worst([other, one])
        assert worst([one, other, one]) in (one, other)
    assert worst([]) is Verdict.NOT_EXERCISED
    assert worst(Verdict) is Verdict.UNKNOWN
    for failure in FAILURES:
        assert worst([failure, Verdict.HOLDS, Verdict.DEVIATION, Verdict.BLOCKED]) is failure
    assert worst([Verdict.NOT_CLAIMED, Verdict.HOLDS]) is Verdict.HOLDS
    assert FAILURES < REFUSES_CERTIFICATE
