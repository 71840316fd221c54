"""The terminal summary of a run: blame, a table of profiles, broken rules by cause. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from conformance.report.causes import Cause, causes_of, failed_cases
from conformance.report.conclusion import sentence
from conformance.report.plain import short
from conformance.report.results import RequirementResult, Results
from conformance.rule import PROFILES
from conformance.verdict import Verdict

_SHOWN_CASES = 3
_SHOWN_IDS = 12
_SHOWN_CAUSES = 10
_SHOWN_OF_CAUSE = 3
_GAP = "  "


def summary_lines(results: Results, seconds: float, width: int = 80) -> Iterator[str]:
    """The lines between pytest's own and the verdict.

    seconds: wall time of the run.
    width: columns of the terminal. Ids are never cut, so that they can be copied from it.
    """
    yield from _blames(results, width)
    yield from _table(results, width)
    yield from _causes(results, width)
    yield from _blocked(results, width)
    yield from _deviations(results, width)
    yield from _tainted(results, width)
    yield from _claims(results, width)
    yield from _not_claimed(results, width)
    yield from _not_exercised(results, width)
    yield from _left_out(results, width)
    for fault in results.harness_faults:
        yield from _paragraph(f"harness fault: {fault}", width)
    cases = {case.case for result in results.requirements for case in result.cases}
    yield ""
    yield f"{count_of(len(cases), 'case')} in {duration(seconds)}"


def verdict_line(results: Results) -> str:
    """One sentence on the whole run."""
    said = sentence(results.rows, results.circumstances)
    return f"{results.target.name}: {said}{_selection(results)}"


def _selection(results: Results) -> str:
    """What was left out, at the end of a sentence; "" if nothing was."""
    counts = {"case": len(results.cases_left_out), "file": len(results.files_left_out)}
    parts = [count_of(n, what) for what, n in counts.items() if n]
    were = "was" if sum(counts.values()) == 1 else "were"
    return f"; {' and '.join(parts)} {were} left out" if parts else ""


def count_of(count: int, what: str) -> str:
    """ "1 case", "2 cases": a number and what it counts."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def duration(seconds: float) -> str:
    """ "0.4 s", "52 s", "3 min 05 s": as exact as it matters."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def _blames(results: Results, width: int) -> Iterator[str]:
    """What is wrong, in one sentence each, before anything else."""
    blames = results.blames
    for blame in blames:
        yield from _indented(f"{results.target.name}: {blame}", width, 0)
    if blames:
        yield ""


def _table(results: Results, width: int) -> Iterator[str]:
    columns = [v for v in Verdict if results.counts[v]]
    rows = []
    for profile in PROFILES:
        found = [r for r in results.requirements if r.requirement.profile == profile]
        if any(r.verdict is not Verdict.NOT_EXERCISED for r in found):
            rows.append(_row(profile, found, columns))
    if len(rows) > 1:
        rows.append(_row("all", results.requirements, columns))
    headings = ["profile", *(v.value for v in columns), "cases", "time"]
    table = _aligned([headings, *rows])
    if max(map(len, table)) > width:  # "not claimed" and "not exercised" go over two lines
        above, _, below = zip(*(h.rpartition(" ") for h in headings), strict=True)
        table = _aligned([above, below, *rows])
    yield from table


def _row(name: str, results: Sequence[RequirementResult], columns: list[Verdict]) -> list[str]:
    counts = [sum(r.verdict is v for r in results) for v in columns]
    cases = {case.case: case.seconds for r in results for case in r.cases}
    numbers = [str(n or "") for n in (*counts, len(cases))]
    return [name, *numbers, f"{sum(cases.values()):.1f} s"]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True)]
        lines.append(_GAP.join([f"{first:<{widths[0]}}", *cells]).rstrip())
    return lines


def _causes(results: Results, width: int) -> Iterator[str]:
    causes = causes_of(results)
    for number, cause in enumerate(causes[:_SHOWN_CAUSES]):
        yield from _cause(cause, width, is_first=number == 0 and len(causes) > 1)
    rest = causes[_SHOWN_CAUSES:]
    if rest:
        rules = count_of(sum(len(cause.results) for cause in rest), "requirement")
        said = f"and {count_of(len(rest), 'more cause')} ({rules}); the certificate has them all"
        yield from _paragraph(said, width)


def _cause(cause: Cause, width: int, *, is_first: bool) -> Iterator[str]:
    """The requirements that fail in one way: the first ones with their sentence and a case."""
    unblocks = f"unblocks {count_of(cause.unblocks, 'requirement')}" if cause.unblocks else ""
    if len(cause.results) > 1 or unblocks:
        heading = count_of(len(cause.results), "requirement")
        cases = count_of(len(cause.cases), "case")
        parts = [f"{heading}, {cases}: {short(cause.text)}"]
        parts += [f"fix this first: {unblocks}" if is_first else unblocks] if unblocks else []
        yield from _paragraph("; ".join(parts), width)
    for result in cause.results[:_SHOWN_OF_CAUSE]:
        yield from _broken(result, width)
    others = [result.requirement.id for result in cause.results[_SHOWN_OF_CAUSE:]]
    if others:
        yield from _paragraph("in the same way:", width)
        yield from _listed(others[:_SHOWN_IDS], width)
        if len(others) > _SHOWN_IDS:
            yield f"    and {count_of(len(others) - _SHOWN_IDS, 'more requirement')}"


def _broken(result: RequirementResult, width: int) -> Iterator[str]:
    requirement = result.requirement
    yield ""
    yield f"{result.verdict}: {requirement.id} ({requirement.level})"
    yield from _indented(requirement.says, width)
    wrong = list(failed_cases(result))
    for case in wrong[:_SHOWN_CASES]:
        yield f"    {case.case}"
        yield from _indented(short(case.reason), width, 8)
    if len(wrong) > _SHOWN_CASES:
        yield f"    and {count_of(len(wrong) - _SHOWN_CASES, 'more case')}"


def _blocked(results: Results, width: int) -> Iterator[str]:
    by_reason: dict[str, list[str]] = {}
    for result in results.requirements:
        if result.verdict is Verdict.BLOCKED:
            by_reason.setdefault(result.reason, []).append(result.requirement.id)
    for reason, ids in by_reason.items():
        yield from _paragraph(f"blocked, {reason}:", width)
        yield from _listed(ids, width)


def _deviations(results: Results, width: int) -> Iterator[str]:
    for found in results.deviations:
        if found.matched:
            link = f" ({found.deviation.link})" if found.deviation.link else ""
            yield from _paragraph(f"deviation: {found.deviation.reason}{link}", width)
            yield from _listed(found.matched, width)
        if found.needless:
            yield from _paragraph("declared as a deviation, and holds after all:", width)
            yield from _listed(found.needless, width)
        if found.idle:
            yield from _paragraph("declared as a deviation, and matches no requirement:", width)
            yield from _listed(found.idle, width)


def _tainted(results: Results, width: int) -> Iterator[str]:
    if results.tainted:
        yield from _paragraph(
            "failed once, and not again on fresh ranks; held against no requirement:", width
        )
    for case in results.tainted[:_SHOWN_IDS]:
        yield f"    {case.case}"
        yield from _indented(short(case.tainted), width, 8)
    if len(results.tainted) > _SHOWN_IDS:
        yield f"    and {count_of(len(results.tainted) - _SHOWN_IDS, 'more case')}"


def _claims(results: Results, width: int) -> Iterator[str]:
    if results.under_claims:
        yield from _paragraph("works, although not claimed:", width)
        yield from _listed(results.under_claims, width)


def _not_claimed(results: Results, width: int) -> Iterator[str]:
    found = [r for r in results.requirements if r.verdict is Verdict.NOT_CLAIMED]
    if found:
        yield from _paragraph(f"not claimed: {count_of(len(found), 'requirement')}", width)
        yield from _listed([r.requirement.id for r in found[:_SHOWN_IDS]], width)
    if len(found) > _SHOWN_IDS:
        yield f"    and {len(found) - _SHOWN_IDS} more, which the certificate names"


def _not_exercised(results: Results, width: int) -> Iterator[str]:
    by_reason: dict[str, list[str]] = {}
    for result in results.requirements:
        if result.verdict is Verdict.NOT_EXERCISED:
            by_reason.setdefault(result.reason, []).append(result.requirement.id)
    for reason, ids in by_reason.items():
        count = count_of(len(ids), "requirement")
        yield from _paragraph(f"not exercised, {reason}: {count}", width)
        if len(ids) <= _SHOWN_IDS:
            yield from _listed(ids, width)


def _left_out(results: Results, width: int) -> Iterator[str]:
    ids = [r.requirement.id for r in results.requirements if r.left_out and r.cases]
    if ids:
        count = count_of(len(ids), "requirement")
        yield from _paragraph(
            f"judged without some of its cases, which were left out: {count}", width
        )
        if len(ids) <= _SHOWN_IDS:
            yield from _listed(ids, width)


def _paragraph(text: str, width: int) -> Iterator[str]:
    yield ""
    yield from textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def _indented(text: str, width: int, by: int = 4) -> list[str]:
    indent = " " * by
    return textwrap.wrap(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _listed(words: Sequence[str], width: int) -> list[str]:
    return _indented(", ".join(words), width)
