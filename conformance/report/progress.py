"""How far a run is, and what has failed so far, in one line each. Pure: counts in, lines out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from conformance.report.plain import short
from conformance.report.results import CaseResult
from conformance.verdict import FAILURES, Verdict

_TOLD = FAILURES | {Verdict.UNKNOWN}
_SAME_REASON_MAX = 3  # one cause may fail hundreds of rules; the summary lists them
_IDS_SHOWN = 2

# Before that, the rate tells nothing: the first cases start the ranks.
_CASES_MIN = 10
_SECONDS_MIN = 5.0


class Progress:
    """Counts the rules of a run. A rule is done when all its cases are.

    planned: node id -> the rules that the case covers, of all cases that are to run.
    """

    def __init__(self, planned: Mapping[str, Sequence[str]]) -> None:
        self._waiting = dict(planned)
        self._cases = len(planned)
        self._cases_of = Counter(id for ids in planned.values() for id in ids)
        self._rules = len(self._cases_of)
        self._failed: set[str] = set()
        self._reasons: Counter[str] = Counter()

    def case_done(self, case: str) -> None:
        """A case has ended, however."""
        for id in self._waiting.pop(case, ()):
            self._cases_of[id] -= 1

    def failure(self, result: CaseResult) -> str:
        """What to tell of a case at once: the rules that no case failed before; "" for nothing."""
        bad = {id: verdict for id, verdict in result.verdicts.items() if verdict in _TOLD}
        new = [id for id in bad if id not in self._failed]
        self._failed.update(new)
        if not new:
            return ""
        self._reasons[result.reason] += 1
        if self._reasons[result.reason] > _SAME_REASON_MAX:
            return ""
        verdict = bad[new[0]]
        return f"{verdict}: {_named(new)}{_with(result)}: {short(result.reason)}"

    def line(self, elapsed_s: float) -> str:
        """ "312 of 1,129 rules done, 2 failed, about 3 min left"; elapsed_s: since the start."""
        done = self._rules - sum(count > 0 for count in self._cases_of.values())
        told = [f"{done:,} of {self._rules:,} rules done", f"{len(self._failed):,} failed"]
        cases_done = self._cases - len(self._waiting)
        if cases_done >= _CASES_MIN and elapsed_s >= _SECONDS_MIN and self._waiting:
            told.append(f"about {about(elapsed_s / cases_done * len(self._waiting))} left")
        return ", ".join(told)


def about(seconds: float) -> str:
    """ "10 s", "50 s", "3 min": no more exact than a guess can be."""
    if seconds < 55:
        return f"{max(10, round(seconds, -1)):.0f} s"
    return f"{max(1, round(seconds / 60))} min"


def _named(ids: Sequence[str]) -> str:
    more = len(ids) - _IDS_SHOWN
    return ", ".join(ids[:_IDS_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _with(result: CaseResult) -> str:
    """ " (2 ranks, float32)": the world size and the case's other parameters."""
    size = result.world_size
    said = [] if size is None else [f"{size} rank{'' if size == 1 else 's'}"]
    said += _parameters(result.case, size)
    return f" ({', '.join(said)})" if said else ""


def _parameters(case: str, world_size: int | None) -> Iterable[str]:
    _, bracket, rest = case.partition("[")
    words = rest.removesuffix("]").split("-") if bracket else ()
    return (word for word in words if word != f"ws{world_size}")
