"""What changed from one report of a target to the next, and with each version of torch. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from conformance.report.compare import Change, Kind, compare
from conformance.site.model import BREAKS, Observatory, Report
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
    """A rule whose verdict changed with a version of torch.

    targets: those for which it did.
    was: why it did not hold with the older version, or "".
    is_unsteady: the certificates of these targets went back and forth between holding and breaking
        it, so that a race may be the cause as well as the release.
    """

    id: str
    change: Change
    targets: tuple[str, ...]
    was: str
    is_unsteady: bool


@dataclass(frozen=True, slots=True)
class Release:
    """What a version of torch changed, over all targets that were certified with it and before it.

    selections: of the targets, those of which one of the two certificates is not whole.
    rules: those that went back and forth last; before them, those that changed alike for most
        targets first.
    """

    before: str
    after: str
    targets: tuple[str, ...]
    selections: frozenset[str]
    rules: tuple[ChangedRule, ...]


def steps(history: Sequence[Report]) -> list[Step]:
    """The changes between each two reports that follow each other."""
    return [_step(before, after) for before, after in pairwise(history)]


def unsteady(history: Sequence[Report]) -> frozenset[str]:
    """The rules that a target was seen to break, to keep and to break again, or the other way."""
    seen: dict[str, list[bool]] = {}
    for report in history:
        for id, finding in report.findings.items():
            breaks = finding.verdict in BREAKS
            if breaks or finding.verdict == str(Verdict.HOLDS):
                seen.setdefault(id, []).append(breaks)
    return frozenset(id for id, said in seen.items() if len(list(groupby(said))) > 2)


def releases(observatory: Observatory) -> list[Release]:
    """One for each two versions that follow each other."""
    wavering = {target: unsteady(observatory.history(target)) for target in observatory.targets}
    return [_release(observatory, wavering, *pair) for pair in pairwise(observatory.versions)]


def _release(
    observatory: Observatory, wavering: Mapping[str, frozenset[str]], before: str, after: str
) -> Release:
    old, new = observatory.on(before), observatory.on(after)
    both = [target for target in new if target in old]
    found: dict[tuple[str, Kind, str, str], list[tuple[str, Change]]] = {}
    for target in both:
        for change in _step(old[target], new[target]).changes:
            key = (change.requirement, change.kind, change.before, change.after)
            found.setdefault(key, []).append((target, change))
    rules = []
    for key, alike in found.items():
        targets = tuple(target for target, _ in alike)
        was = old[targets[0]].findings[key[0]].reason
        is_unsteady = all(key[0] in wavering[target] for target in targets)
        rules.append(ChangedRule(key[0], alike[0][1], targets, was, is_unsteady))
    rules.sort(key=_reading_order)
    selections = frozenset(t for t in both if not (old[t].is_whole and new[t].is_whole))
    return Release(before, after, tuple(both), selections, tuple(rules))


def _reading_order(rule: ChangedRule) -> tuple[bool, int, bool, int, str]:
    """Worst kind first; what is blocked comes after what it may rest on."""
    kind, is_blocked = rule.change.kind, rule.change.after == str(Verdict.BLOCKED)
    place = OF_BEHAVIOUR.index(kind)
    return rule.is_unsteady, place, is_blocked, -len(rule.targets), rule.id


def _step(before: Report, after: Report) -> Step:
    changes = compare(before.document, after.document).changes
    behaviour = tuple(change for change in changes if change.kind in OF_BEHAVIOUR)
    return Step(before, after, behaviour, len(changes) - len(behaviour))
