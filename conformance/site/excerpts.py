"""Excerpts of sources: a case with the functions that it uses, a mutant. Nothing is imported."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from conformance.catalogue.chapters import text_of


@dataclass(frozen=True, slots=True)
class _Piece:
    """A function or class at the top of a module. lines: the first, from 0, and one past the last.
    names: what it uses."""

    lines: tuple[int, int]
    names: frozenset[str]


def excerpt(file: Path, name: str, *, with_helpers: bool = False) -> str:
    """The source of a function or class of a file; with the others of the file that it uses before
    it, if asked for."""
    pieces = _pieces(file)
    wanted = [name]
    for each in wanted if with_helpers else ():
        wanted += sorted(pieces[each].names & pieces.keys() - set(wanted))
    lines = text_of(file).splitlines()
    chosen = sorted(pieces[each].lines for each in wanted)
    return "\n\n\n".join("\n".join(lines[slice(*each)]) for each in chosen)


@cache
def _pieces(file: Path) -> dict[str, _Piece]:
    found = {}
    for node in ast.parse(text_of(file)).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = min([node.lineno, *(mark.lineno for mark in node.decorator_list)])
            names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
            found[node.name] = _Piece((first - 1, node.end_lineno or first), frozenset(names))
    return found
