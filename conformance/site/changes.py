"""What changed from one report of a target to the next, and with each version of torch. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from conformance.report.compare import Change, Kind, compare
from conformance.site.model import Observatory, Report
from conformance.verdict import Verdict

# A verdict became another one; the other kinds say that a rule was or was not looked at.
OF_BEHAVIOUR = (Kind.REGRESSION, Kind.STILL_FAILING, Kind.IMPROVEMENT)


@dataclass(frozen=True, slots=True)
class Step:
    """From one report to the next.

    changes: of behaviour, worst kind first.
    exercised: how many rules were looked at in only one of the two.
    """

    before: Report
    after: Report
    changes: tuple[Change, ...]
    exercised: int


@dataclass(frozen=True, slots=True)
class ChangedRule:
    """A rule whose verdict changed with a version of torch. targets: those for which it did."""

    id: str
    change: Change
    targets: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """What a version of torch changed, over all targets that were certified with it and before it.

    rules: of those that changed alike for most targets first.
    """

    before: str
    after: str
    targets: tuple[str, ...]
    rules: tuple[ChangedRule, ...]


def steps(history: Sequence[Report]) -> list[Step]:
    """The changes between each two reports that follow each other."""
    return [_step(before, after) for before, after in pairwise(history)]


def releases(observatory: Observatory) -> list[Release]:
    """One for each two versions that follow each other."""
    return [_release(observatory, *pair) for pair in pairwise(observatory.versions)]


def _release(observatory: Observatory, before: str, after: str) -> Release:
    old, new = observatory.on(before), observatory.on(after)
    both = [target for target in new if target in old]
    found: dict[tuple[str, Kind, str, str], list[tuple[str, Change]]] = {}
    for target in both:
        for change in _step(old[target], new[target]).changes:
            key = (change.requirement, change.kind, change.before, change.after)
            found.setdefault(key, []).append((target, change))
    rules = [
        ChangedRule(key[0], alike[0][1], tuple(target for target, _ in alike))
        for key, alike in found.items()
    ]
    rules.sort(key=_reading_order)
    return Release(before, after, tuple(both), tuple(rules))


def _reading_order(rule: ChangedRule) -> tuple[int, bool, int, str]:
    """Worst kind first; what is blocked comes after what it may rest on."""
    kind, is_blocked = rule.change.kind, rule.change.after == str(Verdict.BLOCKED)
    return OF_BEHAVIOUR.index(kind), is_blocked, -len(rule.targets), rule.id


def _step(before: Report, after: Report) -> Step:
    changes = compare(before.document, after.document).changes
    behaviour = tuple(change for change in changes if change.kind in OF_BEHAVIOUR)
    return Step(before, after, behaviour, len(changes) - len(behaviour))
