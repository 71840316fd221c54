"""Merges cases' verdicts into a run's results: requirements, deviations, conclusion and blame."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from conformance.report.blame import Facet, Observation, sentences_of_blame
from conformance.report.case_failure import Failure
from conformance.report.conclusion import (
    Circumstances,
    Conclusion,
    Row,
    conclude,
    conclusions_of_profiles,
)
from conformance.rule import Catalogue, Requirement
from conformance.target import Deviation, Target, matched
from conformance.verdict import FAILURES, Verdict, worst

_PAIRS_OF_REAL_NUMBERS = {"dtype:complex64", "dtype:complex128"}
_EXERCISED = FAILURES | {Verdict.HOLDS}
_NONE_SELECTED = "no case of it was selected"


@dataclass(frozen=True, slots=True)
class CaseResult:
    """What one run of one case says of each requirement that it covers.

    case: pytest's node id.
    verdicts: requirement id -> verdict.
    seen: the verdict before the target's deviations and claims were looked at.
    reason: why, in one line; "" if it holds.
    lacks: capabilities that the target does not claim and for which the case was only a probe.
    worked: whether the checks passed; a probe that worked shows that the target claims too little.
    failure: of a case that failed without an excuse.
    facets: what it is about, as kinds and values, such as ("op", "gather").
    tainted: "" or, of a case that failed once and passed whenever it was repeated on fresh ranks,
        how and after which case.
    """

    case: str
    verdicts: Mapping[str, Verdict]
    seen: Verdict
    seconds: float
    world_size: int | None
    reason: str = ""
    lacks: tuple[str, ...] = ()
    worked: bool = False
    failure: Failure | None = None
    tainted: str = ""
    facets: tuple[Facet, ...] = ()

    @property
    def exercises(self) -> bool:
        """Whether it says anything of the target."""
        return any(verdict is not Verdict.NOT_EXERCISED for verdict in self.verdicts.values())

    def to_plain(self) -> dict[str, Any]:
        """As dicts, lists, strings and numbers, for the way from a pytest worker."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        plain["verdicts"] = {id: verdict.value for id, verdict in self.verdicts.items()}
        plain["seen"] = self.seen.value
        plain["lacks"] = list(self.lacks)
        plain["failure"] = self.failure and self.failure.to_plain()
        plain["facets"] = [list(facet) for facet in self.facets]
        return plain

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> CaseResult:
        """The inverse of `to_plain`."""
        verdicts = {id: Verdict(verdict) for id, verdict in plain["verdicts"].items()}
        seen, lacks = Verdict(plain["seen"]), tuple(plain["lacks"])
        failure = plain["failure"] and Failure.from_plain(plain["failure"])
        facets = tuple((kind, value) for kind, value in plain["facets"])
        words = {"verdicts": verdicts, "seen": seen, "lacks": lacks, "failure": failure}
        return CaseResult(**{**plain, **words, "facets": facets})


@dataclass(frozen=True, slots=True)
class RequirementResult:
    """What a run says of one requirement.

    root: the broken requirement because of which it is blocked, or "".
    left_out: node ids of cases of it that the suite's own options ask for and that did not run.
    """

    requirement: Requirement
    verdict: Verdict
    reason: str
    cases: tuple[CaseResult, ...] = ()
    root: str = ""
    left_out: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        return sum(case.seconds for case in self.cases)


@dataclass(frozen=True, slots=True)
class DeviationResult:
    """What a run says of one deviation that the target declares.

    matched: requirements that are broken as it says.
    needless: requirements that it excuses and that hold after all, in every case.
    otherwise: requirements that it covers and that came out in another way, a worse one included.
    idle: its patterns that match no requirement at all.
    """

    deviation: Deviation
    matched: tuple[str, ...]
    needless: tuple[str, ...]
    otherwise: tuple[str, ...]
    idle: tuple[str, ...]


@dataclass(frozen=True)  # without slots: what is worked out from the cases is kept
class Results:
    """A whole run.

    other_failures: node ids of failed cases that cover no requirement.
    interrupted: whether somebody stopped it, so that what is missing says nothing.
    files_left_out: files of the suite of which no case was collected.
    restricted: whether world sizes that cases ask for were left out.
    is_selective: whether the suite's own options asked for some requirements only.
    """

    target: Target
    requirements: tuple[RequirementResult, ...]
    harness_faults: tuple[str, ...]
    other_failures: tuple[str, ...] = ()
    interrupted: bool = False
    files_left_out: tuple[str, ...] = ()
    restricted: bool = False
    is_selective: bool = False

    @cached_property
    def rows(self) -> list[Row]:
        """What decides the conclusion, requirement by requirement."""
        return [
            Row(
                r.requirement.profile,
                r.verdict,
                any(case.exercises for case in r.cases),
                len(r.cases),
                len(r.left_out),
            )
            for r in self.requirements
        ]

    @property
    def circumstances(self) -> Circumstances:
        """What decides the conclusion beside the verdicts."""
        return Circumstances(
            harness_failed=bool(self.harness_faults),
            interrupted=self.interrupted,
            restricted=self.restricted,
            files_left_out=bool(self.files_left_out),
            failed_once=len(self.tainted),
        )

    @property
    def conclusion(self) -> Conclusion:
        """What the run comes to."""
        return conclude(self.rows, self.circumstances)

    @cached_property
    def conclusions_of_profiles(self) -> dict[str, Conclusion]:
        """What the run proves of each profile."""
        return conclusions_of_profiles(self.rows, self.circumstances)

    @property
    def is_whole(self) -> bool:
        """Whether nothing was selected or left out, and the run came to its end."""
        return not (self.interrupted or self.is_selective or self.restricted) and not (
            self.cases_left_out or self.files_left_out
        )

    @property
    def why_nothing(self) -> str:
        """Why most of what was to run did not, where nothing was exercised."""
        asked = [r.reason for r in self.requirements if r.cases or r.left_out]
        return Counter(asked).most_common(1)[0][0] if asked else _NONE_SELECTED

    @property
    def cases_left_out(self) -> tuple[str, ...]:
        """Node ids of all cases that were left out, sorted."""
        return tuple(sorted({case for r in self.requirements for case in r.left_out}))

    @property
    def counts(self) -> Counter[Verdict]:
        """How many requirements came to each verdict."""
        return Counter(r.verdict for r in self.requirements)

    @cached_property
    def deviations(self) -> list[DeviationResult]:
        """What became of each declared deviation, in the target's order."""
        by_id = {r.requirement.id: r for r in self.requirements}
        return [self._deviation(d, by_id) for d in self.target.deviations]

    @property
    def tainted(self) -> list[CaseResult]:
        """Cases that failed once and did not fail again on fresh ranks, in their order."""
        return list({case.case: case for case in self._cases() if case.tainted}.values())

    @property
    def under_claims(self) -> list[str]:
        """Capabilities that the target does not claim although probes of them worked, and none that
        needs nothing else was refused or failed.

        A probe that was not run, or that lacks other capabilities too, says nothing against one.
        Nor does one speak for them that worked without what another probe was refused: it did not
        use all that its requirement rests on. Nothing speaks for complex numbers: torch hands a
        backend pairs of real ones instead.
        """
        probes = [case for case in self._cases() if case.lacks and case.seen in _EXERCISED]
        failed = {frozenset(case.lacks) for case in probes if not case.worked}
        worked = {frozenset(case.lacks) for case in probes if case.worked}
        told = [lacks for lacks in worked if not any(other <= lacks for other in failed)]
        return sorted(frozenset().union(*told) - _PAIRS_OF_REAL_NUMBERS)

    @property
    def blames(self) -> list[str]:
        """What separates the cases that fail from those that pass, a sentence each, the one that
        explains most first. Cases that fail as declared do not count."""
        # One case may say two things: that its rule holds, and that it left something behind.
        cases = {(case.case, case.facets): case for case in self._cases() if case.facets}
        return sentences_of_blame([o for o in map(_observation, cases.values()) if o])

    def _deviation(
        self, deviation: Deviation, by_id: Mapping[str, RequirementResult]
    ) -> DeviationResult:
        covered = [by_id[id] for id in deviation.covered(by_id)]
        as_it_says = [r for r in covered if self._matches(r, deviation)]
        # A case that was left out may be the one that breaks.
        needless = [r for r in covered if r.verdict is Verdict.HOLDS and not r.left_out]
        # What another entry excuses, for breaking in another way, is no concern of this one.
        as_declared = {Verdict.DEVIATION, Verdict.HOLDS, Verdict.NOT_EXERCISED}
        otherwise = [r for r in covered if r.verdict not in as_declared]
        return DeviationResult(
            deviation,
            matched=tuple(r.requirement.id for r in as_it_says),
            needless=tuple(r.requirement.id for r in needless),
            otherwise=tuple(r.requirement.id for r in otherwise),
            idle=tuple(p for p in deviation.requirements if not matched(p, by_id)),
        )

    def _matches(self, result: RequirementResult, deviation: Deviation) -> bool:
        """Whether a case broke in the way that this entry declares before all others."""
        id = result.requirement.id
        return result.verdict is Verdict.DEVIATION and any(
            case.verdicts[id] is Verdict.DEVIATION
            and self.target.deviation(id, case.seen) is deviation
            for case in result.cases
        )

    def _cases(self) -> Iterable[CaseResult]:
        return (case for result in self.requirements for case in result.cases)


def _observation(case: CaseResult) -> Observation | None:
    """What a case says of a cause. A blocked case that ran nevertheless says something too."""
    came_to = set(case.verdicts.values())
    blocked = came_to == {Verdict.BLOCKED}
    failed = case.seen in FAILURES and (blocked or not came_to.isdisjoint(FAILURES))
    if failed or (case.worked and case.seen is Verdict.HOLDS):
        return Observation(frozenset(case.facets), case.seen, blocked)
    return None


def judge(
    catalogue: Catalogue,
    target: Target,
    cases: Iterable[CaseResult],
    not_exercised: Mapping[str, tuple[Verdict, str]],
    harness_faults: Iterable[str] = (),
    other_failures: Iterable[str] = (),
    *,
    interrupted: bool = False,
    planned: Mapping[str, Sequence[str]] | None = None,
    files_left_out: Iterable[str] = (),
    restricted: bool = False,
    is_selective: bool = False,
) -> Results:
    """Merge what all cases say, in whatever order and from whichever worker they came.

    not_exercised: requirement id -> the verdict if no case of it ran, and why.
    planned: node id -> requirement ids, of all cases that should have run.
    For the rest see `Results`.
    """
    cases = list(cases)
    by_requirement = _by_requirement(cases)
    left_out = _left_out(planned or {}, {case.case for case in cases})
    seen = {id: worst(c.verdicts[id] for c in found) for id, found in by_requirement.items()}
    results = []
    for id, requirement in catalogue.items():
        found = tuple(by_requirement.get(id, ()))
        if found:
            verdict = seen[id]
            reason = next((c.reason for c in found if c.verdicts[id] is verdict and c.reason), "")
        else:
            verdict, reason = not_exercised.get(id, (Verdict.NOT_EXERCISED, _NONE_SELECTED))
            if verdict is Verdict.NOT_EXERCISED and id in left_out:
                reason = "its cases were left out"
        root = ""
        if verdict in FAILURES or verdict is Verdict.BLOCKED:
            root = next((r for r in catalogue.roots(id) if seen.get(r) in FAILURES), "")
        if root and verdict in FAILURES:
            # The case ran before it was known that what it rests on is broken.
            verdict = Verdict.BLOCKED
        if verdict is Verdict.BLOCKED:
            reason = reason_of_blocked(root, seen[root]) if root else reason
        missing = tuple(left_out.get(id, ()))
        results.append(RequirementResult(requirement, verdict, reason, found, root, missing))
    return Results(
        target,
        tuple(results),
        tuple(harness_faults),
        tuple(other_failures),
        interrupted,
        tuple(files_left_out),
        restricted,
        is_selective,
    )


def reason_of_blocked(root: str, verdict: Verdict) -> str:
    """Why a requirement is blocked that rests on `root`, which has that verdict."""
    return f"rests on {root}, which is {verdict}"


def _by_requirement(cases: Iterable[CaseResult]) -> dict[str, list[CaseResult]]:
    """Requirement id -> the cases that say something of it."""
    found: dict[str, list[CaseResult]] = {}
    for case in cases:
        for id in case.verdicts:
            found.setdefault(id, []).append(case)
    return found


def _left_out(planned: Mapping[str, Sequence[str]], ran: set[str]) -> dict[str, list[str]]:
    """Requirement id -> the node ids of those of its cases that were planned and did not run."""
    found: dict[str, list[str]] = {}
    for name, ids in planned.items():
        for id in ids if name not in ran else ():
            found.setdefault(id, []).append(name)
    return found
