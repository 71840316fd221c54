"""Checks the reports of `reports/`: each certificate as `verify` does, its folder, and its page.

python -m ci.reports            # reports/, or the folder that is named
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from conformance.catalogue.rules import catalogue
from conformance.report.certificate import CERTIFICATE, JUNIT, digest_of_requirements
from conformance.report.reading import Unreadable, read_certificate
from conformance.report.verify import junit_problems, problems
from conformance.site.model import report_of, slug
from conformance.site.reading import REPRODUCE

REPORTS = Path(__file__).parents[1] / "reports"
TEMPLATE = REPORTS / "TEMPLATE.md"
_FILES = {CERTIFICATE, JUNIT, REPRODUCE}
_PAGES = {"README.md", "TEMPLATE.md"}
_COMMAND = re.compile(r"^(?: {4}|\t|```)", re.MULTILINE)
_PLACEHOLDER = re.compile(r"^<[A-Z].*>$", re.MULTILINE)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="ci/reports",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", nargs="?", type=Path, default=REPORTS)
    reports = parser.parse_args().folder
    found = list(problems_of(reports))
    for problem in found:
        print(problem, file=sys.stderr)
    print(f"{len(list(reports.glob(f'*/*/{CERTIFICATE}')))} reports, {len(found)} problems")
    return int(bool(found))


def problems_of(reports: Path) -> Iterator[str]:
    """One line for everything that is wrong with the reports in a folder."""
    for entry in sorted(reports.iterdir()):
        if not entry.is_dir():
            if entry.name not in _PAGES:
                yield f"{entry}: a report is a folder <version of torch>/<target>"
            continue
        for report in sorted(entry.iterdir()):
            yield from (f"{report}: {problem}" for problem in problems_of_report(report))


def problems_of_report(folder: Path) -> Iterator[str]:
    """What is wrong with one report, `reports/2.13.0/mine`."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if missing := {CERTIFICATE, REPRODUCE} - names:
        yield f"it lacks {', '.join(sorted(missing))}"
        return
    if others := names - _FILES:
        yield f"{', '.join(sorted(others))}: only {', '.join(sorted(_FILES))} belong there"
    try:
        document = read_certificate(folder / CERTIFICATE)
    except Unreadable as error:
        yield f"{CERTIFICATE}: {error}"
        return
    of_certificate = list(problems(document, of_this_suite=_is_of_this_suite(document)))
    yield from of_certificate
    if of_certificate:
        return  # the rest relies on it
    if JUNIT in names:
        yield from junit_problems(document, folder / JUNIT)
    report = report_of(document)
    due = (report.torch, slug(report.target))
    if due != (folder.parent.name, folder.name):
        yield f"it is {report.target} on torch {report.torch}: its folder should be {'/'.join(due)}"
    text = (folder / REPRODUCE).read_text(encoding="utf-8", errors="replace")
    yield from (f"{REPRODUCE}: {problem}" for problem in problems_of_page(text))


def _is_of_this_suite(document: dict[str, Any]) -> bool:
    """Whether it was made with the rules that are here; those of earlier states differ."""
    suite = document.get("suite")
    said = suite.get("requirements_digest") if isinstance(suite, dict) else None
    return bool(said == digest_of_requirements(catalogue().values()))


def problems_of_page(text: str) -> Iterator[str]:
    """What is missing of a page that says how to make a certificate again."""
    template, page = sections(TEMPLATE.read_text(encoding="utf-8")), sections(text)
    if list(page) != list(template):
        yield f"its sections should be {', '.join(template)}, and are {', '.join(page) or 'none'}"
    for name in template.keys() & page.keys():
        words = page[name].strip()
        if not words or words == template[name].strip() or _PLACEHOLDER.search(words):
            yield f"section {name!r} is not filled in"
        elif _COMMAND.search(template[name]) and not _COMMAND.search(page[name]):
            yield f"section {name!r} has no command"


def sections(text: str) -> dict[str, str]:
    """Heading -> text, of the second level."""
    parts = re.split(r"^## +(.+?) *$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


if __name__ == "__main__":
    sys.exit(main())
