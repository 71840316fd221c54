"""Renders the pages of the site from templates. Each is a path in the site and a text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from conformance.report.html import TONES, base_style
from conformance.report.plain import plain, short
from conformance.report.terminal import count_of, duration
from conformance.rule import PROFILES
from conformance.site.badges import badge
from conformance.site.changes import releases, steps
from conformance.site.entries import Entry
from conformance.site.model import BREAKS, Observatory, Report, missing_rules, slug
from conformance.verdict import FAILURES, Verdict

_HERE = Path(__file__).parent

Page = tuple[str, str]

# Conclusion -> a sign that takes the place of one letter in a table.
_SIGNS = {
    "conformant": "\N{CHECK MARK}",
    "not conformant": "\N{MULTIPLICATION X}",
    "no conclusion": "\N{TILDE OPERATOR}",
    "nothing exercised": "\N{MIDDLE DOT}",
}
_TONES = {**TONES, "nothing exercised": "absent"}  # of a profile: there was nothing to try
_FAILURES = sorted(map(str, FAILURES))


class Pages:
    """All pages of an observatory. entries: of each of its requirements."""

    def __init__(self, observatory: Observatory, entries: Mapping[str, Entry]) -> None:
        self._observatory = observatory
        self._entries = entries
        self._releases = releases(observatory)
        self._tallies = {id: observatory.tally(id) for id in entries}
        self._slugs = {target: slug(target) for target in observatory.targets}
        self._environment = Environment(
            loader=FileSystemLoader(_HERE / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._environment.filters.update(
            count_of=count_of, duration=duration, plain=plain, short=short
        )
        self._environment.globals.update(
            observatory=observatory,
            entries=entries,
            tallies=self._tallies,
            slugs=self._slugs,
            profiles=PROFILES,
            tone=_TONES,
            sign=_SIGNS,
            failures_in=failures_in,
            newest=max((report.date for report in observatory.reports), default=""),
        )

    def all(self) -> Iterator[Page]:
        """Every file of the site."""
        yield "style.css", base_style() + (_HERE / "site.css").read_text(encoding="utf-8")
        yield "site.js", (_HERE / "site.js").read_text(encoding="utf-8")
        yield self._page("index.html", suspects=self._observatory.suspects())
        yield self._page("rules.html")
        yield self._page("suspects.html", suspects=self._observatory.suspects())
        yield self._page("history.html")
        yield self._page("versions.html", releases=self._releases)
        yield self._page("map.html", files=self._files())
        for torch in self._observatory.versions:
            yield self._page(f"versions/{torch}.html", "version.html", torch=torch)
        for target in self._observatory.targets:
            yield from self._of_target(target)
        for id, entry in self._entries.items():
            yield self._page(f"rules/{id}.html", "rule.html", entry=entry)

    def _page(self, path: str, template: str = "", /, **context: Any) -> Page:
        found = self._environment.get_template(template or path)
        return path, found.render(context, path=path, root="../" * path.count("/"))

    def _of_target(self, target: str) -> Iterator[Page]:
        report = self._observatory.current[target]
        history = self._observatory.history(target)
        folder = self._slugs[target]
        yield self._page(
            f"targets/{folder}.html",
            "target.html",
            target=target,
            report=report,
            history=history,
            steps=steps(history),
            missing={r.anchor: missing_rules(r, self._observatory.of_suite) for r in history},
            findings=list(by_verdict(report)),
        )
        said = str(report.document["conclusion"])
        shown = said if report.is_whole else f"{said}, a selection"
        yield f"badges/{folder}.svg", badge(f"c10d on torch {report.torch}", shown, _TONES[said])
        for profile, row in report.profiles.items():
            said = row["conclusion"]
            said = "not exercised" if said == "nothing exercised" else said
            label = f"{profile} on torch {report.torch}"
            yield f"badges/{folder}/{profile}.svg", badge(label, said, _TONES[row["conclusion"]])

    def _files(self) -> list[tuple[str, list[Entry]]]:
        """File of torch -> its rules, the file with most rules first."""
        ordered = sorted(self._entries.values(), key=lambda entry: entry.torch_file)
        groups = groupby(ordered, key=lambda entry: entry.torch_file)
        found = [(file, list(of_file)) for file, of_file in groups]
        return sorted(found, key=lambda pair: -len(pair[1]))


def failures_in(counts: Mapping[str, int]) -> int:
    """How many rules were seen broken and not declared."""
    return sum(counts[verdict] for verdict in _FAILURES)


def by_verdict(report: Report) -> Iterator[tuple[str, list[tuple[str, list[str]]]]]:
    """Verdict -> reasons, each with the rules of which it is said; what holds is left out."""
    found: dict[str, dict[str, list[str]]] = {}
    for id, finding in report.findings.items():
        found.setdefault(finding.verdict, {}).setdefault(finding.reason, []).append(id)
    for verdict in _reading_order(found):
        yield verdict, sorted(found[verdict].items(), key=lambda entry: -len(entry[1]))


def _reading_order(verdicts: Iterable[str]) -> list[str]:
    return sorted(
        set(verdicts) - {str(Verdict.HOLDS)},
        key=lambda v: (v not in BREAKS or v == str(Verdict.DEVIATION), v),
    )
