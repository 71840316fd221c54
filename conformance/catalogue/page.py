"""Renders RULES.md: all rules in Markdown, with links to the lines of their cases and mutants."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from conformance.catalogue.chapters import PACKAGE, text_of
from conformance.catalogue.mutants import FOLDER, Mutant, mutants_in
from conformance.catalogue.rules import Rule, rules
from conformance.rule import PROFILES

PAGE = PACKAGE / "RULES.md"

_HEAD = """# Rules

Every rule of the suite, where it is written with its case, and the mutants that its cases must
reject. Made by `python -m conformance list --page > conformance/RULES.md`.
"""


def page() -> str:
    """The page as Markdown; its links are relative to the folder of the package."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield _HEAD
    mutants = _by_rule()
    for profile in PROFILES:
        mine = [rule for rule in rules().values() if rule.file.parent.name == profile]
        yield f"- [{profile}](#{profile}): {len(mine)}"
    for profile in PROFILES:
        yield f"\n## {profile}\n"
        mine = [rule for rule in rules().values() if rule.file.parent.name == profile]
        for file, chapter in groupby(mine, key=lambda rule: rule.file):
            about = (ast.get_docstring(ast.parse(text_of(file))) or "").partition("\n\n")[0]
            yield f"\n### [{file.stem}]({_link(file)})\n"
            yield " ".join(about.split())
            yield "\n| rule | level | says | mutants |"
            yield "|---|---|---|---|"
            for rule in chapter:
                yield _row(rule, mutants.get(rule.requirement.id, []))
    yield ""


def _row(rule: Rule, mutants: list[Mutant]) -> str:
    one = rule.requirement
    where = f"[{one.id}]({_link(rule.file, rule.line)})"
    proofs = ", ".join(f"[{m.name}]({_link(m.file, m.line)})" for m in mutants)
    says = one.says.replace("|", "\\|")
    return f"| {where} | {one.level} | {says} | {proofs} |"


def _by_rule() -> dict[str, list[Mutant]]:
    found: dict[str, list[Mutant]] = {}
    for file in sorted(FOLDER.glob("*/*.py")):
        for mutant in mutants_in(file):
            for id in mutant.breaks:
                found.setdefault(id, []).append(mutant)
    return found


def _link(file: Path, line: int | None = None) -> str:
    path = Path(os.path.relpath(file, PACKAGE)).as_posix()
    return path if line is None else f"{path}#L{line}"
