"""Mutants, read from the sources of the tests: which rules each of them breaks."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from conformance.catalogue.chapters import PACKAGE, named_in, text_of

# Only in a checkout: the tests are not installed with the suite.
FOLDER = PACKAGE.parent / "tests" / "mutants"


@dataclass(frozen=True, slots=True)
class Mutant:
    """A class that breaks rules.

    line: of its first decorator, 1 for the first.
    breaks: ids of the rules that must reject it.
    says: first sentence of the docstring, or "".
    """

    file: Path
    line: int
    name: str
    breaks: tuple[str, ...]
    says: str


def mutants_of(id: str) -> list[Mutant]:
    """Those that break a rule, in the order of their files; none where there are no tests."""
    files = (file for file in sorted(FOLDER.glob("*/*.py")) if id in named_in(file))
    return [mutant for file in files for mutant in mutants_in(file) if id in mutant.breaks]


def mutants_in(file: Path) -> Iterator[Mutant]:
    """Every mutant of a file."""
    for node in ast.parse(text_of(file)).body:
        if isinstance(node, ast.ClassDef):
            marks = [mark for mark in node.decorator_list if isinstance(mark, ast.Call)]
            marks = [mark for mark in marks if ast.unparse(mark.func) == "breaks"]
            if marks:
                yield Mutant(
                    file=file,
                    line=node.decorator_list[0].lineno,
                    name=node.name,
                    breaks=tuple(ast.literal_eval(mark.args[0]) for mark in marks),
                    says=" ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split()),
                )
