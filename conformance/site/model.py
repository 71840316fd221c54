"""What many certificates say together: of each target, rule and version of torch. Pure.

One certificate speaks for a target on a version of torch: the newest whole one, or the newest
selection where there is no whole one. All of them are its history.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from packaging.version import Version

from conformance.rule import Requirement
from conformance.verdict import FAILURES, Verdict

Document = Mapping[str, Any]

# What was seen broken, whether or not it was declared.
BREAKS = frozenset(map(str, FAILURES | {Verdict.DEVIATION}))
_HOLDS = str(Verdict.HOLDS)
_WITHOUT_FOLDER = "cpu"  # what a target is on unless its name on the site says otherwise


@dataclass(frozen=True, slots=True)
class Finding:
    """What one certificate says of one rule."""

    verdict: str
    reason: str


@dataclass(frozen=True)
class Report:
    """One certificate.

    document: it, with empty lists of cases and failures, which are most of it.
    reproduce: the page that says how to make it again, or "".
    """

    document: Document
    reproduce: str = ""

    @cached_property
    def target(self) -> str:
        """The target's name, with the device if that is not the CPU."""
        name, device = str(self.document["target"]["name"]), self.document["run"]["device"]
        return name if device == _WITHOUT_FOLDER else f"{name} on {device}"

    @cached_property
    def torch(self) -> str:
        """The version of torch, without what a build adds to it."""
        return str(self.document["environment"]["torch"]).partition("+")[0]

    @property
    def date(self) -> str:
        """When the run began, ISO 8601 in UTC, so that texts sort as times."""
        return str(self.document["run"]["started_at"])

    @property
    def began(self) -> str:
        """The same for people, to the minute, since several certificates may be of one day."""
        return self.date[:16].replace("T", " ")

    @property
    def is_whole(self) -> bool:
        """Whether nothing of the suite was left out, by options either."""
        run = self.document["run"]
        left_out = run["restricted"] or run["cases_left_out"] or run["files_left_out"]
        return not left_out and all(chosen is None for chosen in run["selected"].values())

    @cached_property
    def findings(self) -> Mapping[str, Finding]:
        """Rule -> what is said of it."""
        rows = self.document["requirements"]
        return {row["id"]: Finding(row["verdict"], row["reason"]) for row in rows}

    @cached_property
    def profiles(self) -> Mapping[str, Document]:
        """Profile -> its conclusion and counts."""
        return {row["profile"]: row for row in self.document["profiles"]}

    @property
    def anchor(self) -> str:
        """Its id on the page of its target."""
        return str(self.document["digest"]).rpartition(":")[2][:12]


def report_of(document: Document, reproduce: str = "") -> Report:
    """The report of a certificate; its cases and failures can be forgotten."""
    rows = [{**row, "cases": []} for row in document["requirements"]]
    return Report({**document, "requirements": rows, "failures": []}, reproduce)


def slug(name: str) -> str:
    """A name as a part of an address; names that differ have other slugs."""
    plain = re.sub(r"[^a-z0-9_.]+", "-", name.lower()).strip("-.")
    if plain == name:
        return plain
    return f"{plain or 'target'}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"


@dataclass(frozen=True, slots=True)
class Tally:
    """How a rule fares among the targets, one vote each."""

    breaks: int
    holds: int

    @property
    def exercised(self) -> int:
        return self.breaks + self.holds

    @property
    def heat(self) -> int:
        """0 where no target breaks it, 5 where all do, and between them in proportion."""
        if not self.breaks:
            return 0
        return min(5, 1 + 4 * self.breaks // self.exercised)


class Observatory:
    """All reports, by target and by version of torch, both sorted.

    requirements: of the suite; rules that only certificates know come after them.
    """

    def __init__(self, reports: Iterable[Report], requirements: Iterable[Requirement]) -> None:
        different = {report.document["digest"]: report for report in reports}
        self.reports = sorted(different.values(), key=_place_in_history)
        self.targets = sorted({report.target for report in self.reports})
        self.versions = sorted({report.torch for report in self.reports}, key=Version)
        self.requirements = {requirement.id: requirement for requirement in requirements}
        self.of_suite = frozenset(self.requirements)
        for report in reversed(self.reports):
            for row in report.document["requirements"]:
                if row["id"] not in self.requirements:
                    self.requirements[row["id"]] = _requirement(row)

    def history(self, target: str) -> list[Report]:
        """Its reports by version of torch, the older ones of a version first."""
        return [report for report in self.reports if report.target == target]

    @cached_property
    def speaking(self) -> Mapping[tuple[str, str], Report]:
        """(target, version of torch) -> the report that speaks for them."""
        found: dict[tuple[str, str], Report] = {}
        for report in self.reports:
            key = (report.target, report.torch)
            if key not in found or report.is_whole >= found[key].is_whole:
                found[key] = report
        return found

    @cached_property
    def main_version(self) -> str:
        """The version of torch with most targets, of these the newest."""
        counts = Counter(torch for _, torch in self.speaking)
        return max(self.versions, key=lambda torch: (counts[torch], Version(torch)), default="")

    @cached_property
    def current(self) -> Mapping[str, Report]:
        """Target -> the report that speaks for it in tables of targets: a whole one if there is
        one, on the main version if possible, else on the newest."""
        found = {}
        for target in self.targets:
            mine = [report for (name, _), report in self.speaking.items() if name == target]
            found[target] = max(mine, key=self._weight)
        return found

    def _weight(self, report: Report) -> tuple[bool, bool, Version]:
        return report.is_whole, report.torch == self.main_version, Version(report.torch)

    def on(self, torch: str) -> dict[str, Report]:
        """Target -> the report that speaks for it on this version of torch."""
        return {t: self.speaking[t, torch] for t in self.targets if (t, torch) in self.speaking}

    def tally(self, id: str) -> Tally:
        """How many targets break a rule, and of how many it holds, by their current reports."""
        found = [
            report.findings[id].verdict for report in self.current.values() if id in report.findings
        ]
        return Tally(sum(v in BREAKS for v in found), found.count(_HOLDS))

    def suspects(self, *, targets_min: int = 2) -> list[tuple[Requirement, Tally]]:
        """The rules that every target breaks which exercises them, if so many do: the rule may be
        wrong, or torch's own code in front of all targets is. Most targets first."""
        tallies = [(rule, self.tally(id)) for id, rule in self.requirements.items()]
        found = [(r, t) for r, t in tallies if t.breaks >= targets_min and not t.holds]
        return sorted(found, key=lambda pair: (-pair[1].breaks, pair[0].id))

    def declared_of_torch(self, id: str) -> str:
        """Why torch's own code breaks a rule in front of every backend, or ""."""
        for report in self.reports:
            for deviation in report.document["deviations"]:
                if deviation.get("of_torch") and id in deviation["matched"]:
                    return str(deviation["reason"])
        return ""

    def upstream(self, id: str) -> list[str]:
        """Where those who declare that they break a rule say that this is known."""
        found = {
            str(deviation["link"])
            for report in self.reports
            for deviation in report.document["deviations"]
            if deviation["link"] and id in deviation["matched"]
        }
        return sorted(found)

    def reasons(self, id: str) -> list[tuple[Finding, list[Report]]]:
        """What reports say of a rule beyond a verdict, and which ones, the failures first."""
        found: dict[Finding, list[Report]] = {}
        for report in self.speaking.values():
            finding = report.findings.get(id)
            if finding is not None and finding.reason:
                found.setdefault(finding, []).append(report)
        return sorted(found.items(), key=lambda entry: (_severity(entry[0]), -len(entry[1])))


def missing_rules(report: Report, of_suite: Sequence[str] | frozenset[str]) -> int:
    """How many rules of this suite its certificate does not know: it is older."""
    return sum(id not in report.findings for id in of_suite)


def _severity(finding: Finding) -> int:
    if finding.verdict == str(Verdict.NOT_EXERCISED):
        return 2
    return 0 if finding.verdict in BREAKS else 1


def _place_in_history(report: Report) -> tuple[str, Version, str]:
    return report.target, Version(report.torch), report.date


def _requirement(row: Document) -> Requirement:
    fields = ("id", "level", "profile", "says", "source", "needs", "rests_on")
    return Requirement.from_plain({key: row[key] for key in fields})
