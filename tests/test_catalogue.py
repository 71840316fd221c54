"""The catalogue read from the sources equals what importing the chapters gives."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.catalogue.chapters import PACKAGE, SPEC, chapter_files, named_in
from conformance.catalogue.mutants import mutants_of
from conformance.catalogue.page import PAGE, page
from conformance.catalogue.rules import catalogue, rules, rules_in
from conformance.rule import MUST, SHOULD, Requirement

CHAPTER = '''\
"""A chapter."""

from conformance import Chapter

DOCS: str = "torch's docs"
OPS = ("gather", "scatter")

chapter = Chapter("collectives", source=DOCS, needs="op:gather")

ROWS = [
    chapter.must(f"{op}/early", f"{op} returns early.", rests_on=(f"{op}/sum", "a/b"))
    for op in OPS
]


@chapter.should(
    "gather/all",
    "All is gathered, "
    "and nothing else.",
    source=DOCS + ", gather",
    needs=(),
)
@chapter.must("gather/more", "More (of it).", rests_on="gather/all")
def test_gather():
    pass
'''


def test_rules_are_read_with_what_their_chapter_says_and_their_lines(tmp_path: Path) -> None:
    file = tmp_path / "gather.py"
    file.write_text(CHAPTER)

    def rule(id: str, says: str, **facts: object) -> Requirement:
        shared = {"level": MUST, "profile": "collectives", "source": "torch's docs"}
        return Requirement(**{"id": id, "says": says, "needs": ("op:gather",), **shared, **facts})  # type: ignore[arg-type]  # of different types

    assert [(r.requirement, r.line) for r in rules_in(file)] == [
        (rule("gather/early", "gather returns early.", rests_on=("gather/sum", "a/b")), 11),
        (rule("scatter/early", "scatter returns early.", rests_on=("scatter/sum", "a/b")), 11),
        (
            rule(
                "gather/all",
                "All is gathered, and nothing else.",
                level=SHOULD,
                source="torch's docs, gather",
                needs=(),
            ),
            16,
        ),
        (rule("gather/more", "More (of it).", rests_on=("gather/all",)), 23),
    ]


def test_only_chapters_hold_rules_and_every_rule_is_in_one() -> None:
    helpers = set(SPEC.rglob("*.py")) - set(chapter_files())
    assert [file for file in sorted(helpers) if rules_in(file)] == []
    assert set(rules()) == set(catalogue())


def test_what_a_rule_rests_on_is_not_named_as_covered(tmp_path: Path) -> None:
    file = tmp_path / "gather.py"
    file.write_text('@chapter.must("a/b", "It.", rests_on=("c/d", "e/f"))\n@covers("g/h")\n')
    assert named_in(file) == {"a/b", "g/h"}


def test_the_page_of_all_rules_is_fresh() -> None:
    assert PAGE.read_text() == page(), "python -m conformance list --page > conformance/RULES.md"


def test_links_of_the_page_lead_to_what_they_name() -> None:
    rule = rules()["all_reduce/same-bits"]
    assert "all_reduce/same-bits" in "".join(
        rule.file.read_text().splitlines()[rule.line - 1 :][:2]
    )
    [mutant] = mutants_of("all_reduce/same-bits")
    assert "@breaks" in mutant.file.read_text().splitlines()[mutant.line - 1]
    assert f"(../{mutant.file.relative_to(PACKAGE.parent)}#L{mutant.line})" in page()


@pytest.mark.parametrize("command", [["list"], ["explain", "all_reduce/same-bits"]])
def test_rules_are_shown_without_torch_and_without_a_case(command: list[str]) -> None:
    script = (
        "import sys; from conformance.__main__ import main; main(sys.argv[1:]);"
        "print([n for n in sys.modules if n == 'torch' or n.startswith('conformance.spec')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *command], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_page_on_upstreams_suites_names_rules_that_exist() -> None:
    text = (PACKAGE / "UPSTREAM.md").read_text()
    named = re.findall(r"`([a-z0-9_]+/[a-z0-9-]+)`", text)
    assert len(named) > 40
    assert sorted({id for id in named if id not in catalogue()}) == []
