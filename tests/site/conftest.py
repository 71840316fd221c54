"""A small site of four made-up targets on three versions of torch, with rules of the suite."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conformance.catalogue.rules import catalogue
from conformance.report.certificate import seal
from conformance.site.build import write_site
from conformance.site.entries import Entry, entries
from conformance.site.model import Observatory, Report, report_of
from conformance.site.pages import Page, Pages
from tests.report.samples import SMALL, case
from tests.site.samples import B, D, H, document, one

# A name and texts that would be markup if a page took them for it.
EVIL = "</pre><script>alert(1)</script><img src=x onerror=alert(1)>"
RULES = [*SMALL.values(), *(r for id, r in catalogue().items() if id.startswith("all_reduce/"))]


def reports() -> list[Report]:
    evil = case("test_two", "c/two", B, reason=EVIL)
    return [
        *(
            one(H, "alpha", torch, day=day)
            for day, torch in enumerate(("2.12.1", "2.13.0", "2.15.0"), 1)
        ),
        *(one(v, "beta", torch, day=4) for v, torch in ((H, "2.12.1"), (B, "2.13.0"))),
        replace(
            report_of(document("gamma delta", "2.13.0", left_out=3)), reproduce=f"    run {EVIL}"
        ),
        report_of(document(EVIL, "2.13.0", evil, case("test_root", "a/root", D, reason="known"))),
        report_of(older_document()),
    ]


def older_document() -> dict[str, Any]:
    """As a suite wrote it that knew less of a target, asked for one profile."""
    made = document("older", "2.12.1", profiles=["collectives"])
    del made["target"]["fully_shard"]
    made["deviations"] = [
        {**made["deviations"][0], "link": "https://example.org/7", "matched": ["c/one"]}
    ]
    return seal(made)


@pytest.fixture(scope="session")
def proofs() -> dict[str, Entry]:
    """Of each rule."""
    return entries({rule.id: rule for rule in RULES})


@pytest.fixture(scope="session")
def pages(proofs: dict[str, Entry]) -> dict[str, str]:
    """Path -> text."""
    return dict(Pages(Observatory(reports(), RULES), proofs).all())


@pytest.fixture(scope="session")
def site(pages: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that it was written to."""
    folder = tmp_path_factory.mktemp("observatory") / "site"
    items: list[Page] = list(pages.items())
    write_site(folder, items)
    return folder
