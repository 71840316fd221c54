"""Groups broken requirements by the cause of their failure, the most important first. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from conformance.report.results import CaseResult, RequirementResult, Results
from conformance.verdict import FAILURES, Verdict

BAD = FAILURES | {Verdict.UNKNOWN}


@dataclass(frozen=True, slots=True)
class Cause:
    """Requirements that fail in the same way.

    text: the failure's cause, in one line.
    results: the requirements, at least one.
    cases: node ids of the cases that break them, each once.
    unblocks: how many more requirements are blocked because of them.
    """

    text: str
    results: tuple[RequirementResult, ...]
    cases: tuple[str, ...]
    unblocks: int

    @property
    def weight(self) -> int:
        """How many requirements may hold once it is mended."""
        return len(self.results) + self.unblocks


def causes_of(results: Results) -> list[Cause]:
    """Each broken requirement under the cause of its first failed case."""
    found: dict[tuple[Verdict, str], list[RequirementResult]] = {}
    for result in results.requirements:
        if result.verdict in BAD:
            found.setdefault((result.verdict, _cause(result)), []).append(result)
    causes = [_made(text, members, results) for (_, text), members in found.items()]
    return sorted(causes, key=lambda cause: -cause.weight)


def failed_cases(result: RequirementResult) -> Iterator[CaseResult]:
    """The cases to which a requirement owes its verdict."""
    id = result.requirement.id
    return (case for case in result.cases if case.verdicts[id] is result.verdict)


def _cause(result: RequirementResult) -> str:
    case = next(failed_cases(result), None)
    return case.failure.cause if case and case.failure else result.reason


def _made(text: str, members: list[RequirementResult], results: Results) -> Cause:
    ids = {member.requirement.id for member in members}
    cases = dict.fromkeys(case.case for member in members for case in failed_cases(member))
    blocked = (r for r in results.requirements if r.verdict is Verdict.BLOCKED)
    return Cause(text, tuple(members), tuple(cases), sum(r.root in ids for r in blocked))
