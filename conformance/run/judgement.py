"""Decides a case's verdicts from its exception, and the target's claims and deviations. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis.errors import Flaky

from conformance.harness.failure import RanksFailed
from conformance.harness.outcome import Refusal, message_of
from conformance.run.plan import Plan
from conformance.target import Target
from conformance.verdict import Verdict, worst

_NOT_HELD_AGAINST = frozenset(
    {Verdict.DEVIATION, Verdict.NOT_CLAIMED, Verdict.HOLDS, Verdict.BLOCKED}
)
LEAVES_NOTHING_BEHIND = "groups/leaves-nothing-behind"


class LeftBehind(AssertionError):
    """Ranks still held something after a case's groups were destroyed, or did not get that far.

    verdict: the worst of what became of them.
    """

    def __init__(self, text: str, verdict: Verdict = Verdict.BROKEN) -> None:
        super().__init__(text)
        self.verdict = verdict


@dataclass(frozen=True, slots=True)
class Judgement:
    """How a case ended.

    seen: the verdict before deviations and claims were looked at.
    verdicts: requirement id -> verdict.
    reason: why, in one line: the deviation's if one excuses everything; "" if the case passed.
    worked: whether the case's checks passed, and no rank refused anything.
    """

    seen: Verdict
    verdicts: dict[str, Verdict]
    reason: str
    worked: bool

    @property
    def excused(self) -> bool:
        """Whether the case did not hold, and nothing of it is held against the target."""
        held_against = set(self.verdicts.values()) - _NOT_HELD_AGAINST
        return self.seen is not Verdict.HOLDS and not held_against

    def as_blocked(self, why: str) -> Judgement:
        """Of a case that is blocked and ran nevertheless: what was seen, held against nothing."""
        return replace(self, verdicts=dict.fromkeys(self.verdicts, Verdict.BLOCKED), reason=why)


def judge_end(
    error: BaseException | None,
    plan: Plan,
    target: Target,
    why_blocked: str = "",
    refusals: Sequence[Refusal] = (),
    lack: str = "",
) -> Judgement:
    """The verdicts of a case that ended with this exception, or without one.

    why_blocked: what is known to fail, because of which the case was skipped, or "".
    refusals: which ranks refused in the last run of the ranks, see `refusals_of`; if the case ended
        without an exception, in any run of them.
    lack: what the target or its device does not have, see `lack_of`, in the last run.
    """
    seen = Verdict.HOLDS if error is None else verdict_of(error)

    def all_are(verdict: Verdict, reason: str, worked: bool = False) -> Judgement:
        return Judgement(seen, dict.fromkeys(plan.covers, verdict), reason, worked)

    if lack and seen is not Verdict.UNKNOWN:
        return all_are(Verdict.NOT_CLAIMED, f"not claimed: {lack}")
    if error is None and not plan.lacks:
        return all_are(Verdict.HOLDS, "", worked=True)
    if error is None:
        works = f"works, although {', '.join(plan.lacks)} is not claimed"
        reason = f"refused: {refusals[0]}" if refusals else works
        return all_are(Verdict.NOT_CLAIMED, reason, worked=not refusals)
    if isinstance(error, pytest.skip.Exception):
        seen = Verdict.BLOCKED if why_blocked else Verdict.NOT_EXERCISED
        return all_are(seen, why_blocked or str(error.msg))
    # Whatever else a case shows, a call that asks for what is not claimed may be refused.
    excuses = [r for r in refusals if plan.lacks or target.lacks(r.needs)]
    if excuses and seen is not Verdict.UNKNOWN:
        return all_are(Verdict.NOT_CLAIMED, f"refused: {excuses[0]}")
    covers = plan.covers
    # A user's own test, without requirements, may itself have started what is left.
    if covers and isinstance(error, LeftBehind):
        covers = (LEAVES_NOTHING_BEHIND,)
    deviations = [target.deviation(id, seen) for id in covers]
    verdicts = {
        id: Verdict.DEVIATION if deviation else seen
        for id, deviation in zip(covers, deviations, strict=True)
    }
    # A reason that excuses some of the requirements only must not be shown for the others.
    declared = [deviation.reason for deviation in deviations if deviation]
    if declared and len(declared) == len(covers):
        reason = declared[0]
    else:
        reason = error.brief if isinstance(error, RanksFailed) else _first_line(error)
    return Judgement(seen, verdicts, reason, worked=False)


def verdict_of(error: BaseException) -> Verdict:
    """What an exception in a case's own process says of the target."""
    if isinstance(error, RanksFailed | LeftBehind):
        return error.verdict
    # pytest's own is what `pytest.fail` and a `pytest.raises` without an exception raise.
    if isinstance(error, AssertionError | pytest.fail.Exception):
        return Verdict.BROKEN
    # Hypothesis groups what it found: several bugs, or one that did not show twice.
    grouped = getattr(error, "exceptions", ())
    if grouped:
        return worst(map(verdict_of, grouped))
    # The same example went otherwise the second time, and nothing but the ranks may differ.
    return Verdict.BROKEN if isinstance(error, Flaky) else Verdict.UNKNOWN


def _first_line(error: BaseException) -> str:
    return (message_of(error).splitlines() or [type(error).__name__])[0]
