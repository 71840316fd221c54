"""`ci/reports`: what it asks of a report that is handed in."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ci.reports import REPORTS, TEMPLATE, problems_of, problems_of_page
from conformance.catalogue.rules import catalogue
from conformance.report.certificate import seal
from conformance.rule import Catalogue
from tests.report.samples import whole_certificate

SUITE = Catalogue(r for id, r in catalogue().items() if id.startswith("all_reduce/"))
PAGE = re.sub(r"<[A-Z][^>]*>", "So it is.", TEMPLATE.read_text())


def made(**environment: str) -> dict[str, Any]:
    document = whole_certificate(suite=SUITE)
    document["environment"].update({"torch": "2.13.0+cpu", **environment})
    return seal(document)


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A report without a fault."""
    for module in ("ci.reports", "conformance.report.verify"):
        monkeypatch.setattr(f"{module}.catalogue", lambda: SUITE)
    folder = tmp_path / "reports" / "2.13.0" / "sample"
    folder.mkdir(parents=True)
    (folder / "certificate.json").write_text(json.dumps(made()))
    (folder / "REPRODUCE.md").write_text(PAGE)
    return folder


def problems(report: Path) -> list[str]:
    return list(problems_of(report.parents[1]))


def test_a_report_as_it_should_be_has_no_problems(report: Path) -> None:
    assert problems(report) == []


def test_the_reports_of_this_repository_have_none() -> None:
    assert list(problems_of(REPORTS)) == []


def rename(report: Path) -> Path:
    return report.rename(report.with_name("other"))


def rewrite(report: Path, **changes: Any) -> None:
    (report / "certificate.json").write_text(json.dumps({**made(), **changes}))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda r: (r / "REPRODUCE.md").unlink(), "it lacks REPRODUCE.md"),
        (lambda r: (r / "certificate.json").unlink(), "it lacks certificate.json"),
        (lambda r: (r / "report.html").touch(), "report.html: only REPRODUCE.md"),
        (lambda r: (r.parents[1] / "mine.json").touch(), "mine.json: a report is a folder"),
        (rename, "its folder should be 2.13.0/sample"),
        (lambda r: r.parent.rename(r.parents[1] / "2.14.0"), "should be 2.13.0/sample"),
        (lambda r: rewrite(r, conclusion="unknown"), "does not match its digest"),
        (lambda r: (r / "certificate.json").write_text("{"), "not JSON"),
        (lambda r: (r / "junit.xml").write_text("<testsuites/>"), "junit.xml does not have"),
        (lambda r: (r / "REPRODUCE.md").write_text("# Ran it"), "its sections should be Target"),
    ],
)
def test_what_is_wrong_is_said(report: Path, spoil: Callable[[Path], object], says: str) -> None:
    spoil(report)
    assert any(says in problem for problem in problems(report)), problems(report)


def test_a_report_of_an_earlier_suite_stays_valid(
    report: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grown = Catalogue([*SUITE.values(), catalogue()["broadcast/values"]])
    for module in ("ci.reports", "conformance.report.verify"):
        monkeypatch.setattr(f"{module}.catalogue", lambda: grown)
    assert problems(report) == []


@pytest.mark.parametrize("section", ["Target", "Machine", "Install", "Run", "What to expect"])
def test_every_section_of_the_page_is_filled_in(section: str) -> None:
    assert list(problems_of_page(PAGE)) == []
    parts = re.split(r"^(## .*)$", PAGE, flags=re.MULTILINE)
    parts[parts.index(f"## {section}") + 1] = "\n\n"
    assert list(problems_of_page("".join(parts))) == [f"section {section!r} is not filled in"]


def test_a_page_that_is_the_template_is_refused() -> None:
    assert len(list(problems_of_page(TEMPLATE.read_text()))) == 5


def test_installing_and_running_are_shown_as_commands() -> None:
    said = problems_of_page(re.sub(r"^ {4}", "", PAGE, flags=re.MULTILINE))
    assert sorted(said) == ["section 'Install' has no command", "section 'Run' has no command"]
