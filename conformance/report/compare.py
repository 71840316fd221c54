"""Compares two certificates: changed verdicts by kind, and other circumstances. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from conformance.verdict import REFUSES_CERTIFICATE, Verdict

_FAILING = {str(verdict) for verdict in REFUSES_CERTIFICATE | {Verdict.UNKNOWN}}
_ABSENT = {str(Verdict.NOT_EXERCISED), ""}

# Of the others, from the best to the worst: a deviation is an admitted failure, so it is worse than
# a capability that was never claimed.
_BEST_FIRST = [str(v) for v in (Verdict.HOLDS, Verdict.NOT_CLAIMED, Verdict.DEVIATION)]


class Kind(str, Enum):
    """What a change of verdict means, in the order in which a reader wants to know."""

    REGRESSION = "regression"
    NO_LONGER_EXERCISED = "no longer exercised"
    EXERCISED_LESS = "some cases left out"
    STILL_FAILING = "fails in another way"
    IMPROVEMENT = "improvement"
    NEWLY_EXERCISED = "newly exercised"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Change:
    """One requirement whose verdict is another one now. A verdict is "" where the certificate does
    not know the requirement."""

    requirement: str
    kind: Kind
    before: str
    after: str
    reason: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """changes: worst kind first. circumstances: fact -> (before, after), where they differ."""

    changes: tuple[Change, ...]
    circumstances: Mapping[str, tuple[str, str]]

    @property
    def has_regressions(self) -> bool:
        return any(change.kind is Kind.REGRESSION for change in self.changes)


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> Comparison:
    """Compare two certificates, the older one first."""
    old = {r["id"]: r for r in before["requirements"]}
    new = {r["id"]: r for r in after["requirements"]}
    changes = []
    for id in dict.fromkeys([*new, *old]):
        was = old[id]["verdict"] if id in old else ""
        now = new[id]["verdict"] if id in new else ""
        kind = _kind(was, now)
        reason = new[id]["reason"] if id in new else ""
        if kind is None and was == now and now not in _ABSENT:
            earlier, missing = (len(rows[id].get("left_out", ())) for rows in (old, new))
            if missing > earlier:
                kind, reason = Kind.EXERCISED_LESS, f"{missing} of its cases did not run"
        if kind is not None:
            changes.append(Change(id, kind, was, now, reason))
    order = list(Kind)
    # What is blocked comes after what it may rest on.
    blocked = str(Verdict.BLOCKED)
    changes.sort(key=lambda change: (order.index(change.kind), change.after == blocked))
    return Comparison(tuple(changes), _circumstances(before, after))


def _kind(was: str, now: str) -> Kind | None:
    if was == now or {was, now} <= _ABSENT:
        return None
    if now in _ABSENT:
        return Kind.NO_LONGER_EXERCISED
    if was in _ABSENT:
        return Kind.NEWLY_EXERCISED
    if now in _FAILING:
        return Kind.STILL_FAILING if was in _FAILING else Kind.REGRESSION
    if was in _FAILING:
        return Kind.IMPROVEMENT
    got_worse = _BEST_FIRST.index(now) > _BEST_FIRST.index(was)
    return Kind.REGRESSION if got_worse else Kind.IMPROVEMENT


def _circumstances(
    before: Mapping[str, Any], after: Mapping[str, Any]
) -> dict[str, tuple[str, str]]:
    facts = [_facts(document) for document in (before, after)]
    names = dict.fromkeys([*facts[0], *facts[1]])
    pairs = {name: (facts[0].get(name, ""), facts[1].get(name, "")) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _facts(document: Mapping[str, Any]) -> dict[str, str]:
    environment, target, run = document["environment"], document["target"], document["run"]
    facts = {
        "conclusion": document["conclusion"],
        "suite": document["suite"]["version"],
        "target": target["name"],
        "backend": target["backend"],
        "device": run["device"],
        **target["versions"],
        **{name: environment[name] for name in ("torch", "python", "platform", "cpus")},
        "world sizes": run["world_sizes"],
        **{f"selected {name}": chosen for name, chosen in run["selected"].items()},
        "cases left out": run.get("cases_left_out", 0),
        "files left out": len(run.get("files_left_out", ())),
        "wall time": f"{run['seconds']:.0f} s",
    }
    return {name: "everything" if fact is None else str(fact) for name, fact in facts.items()}
