"""The suite's cases, read from the sources: which rules they cover, and where they are.

Nothing is imported, and torch least of all. `tests/test_tidiness.py` holds that pytest finds the
same.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from conformance.catalogue.chapters import PACKAGE, chapter_files, text_of
from conformance.catalogue.rules import ids_in, rules_in


@dataclass(frozen=True, slots=True)
class Case:
    """One test function of the suite.

    path: from the folder that the package lies in.
    line: of its first decorator, 1 for the first.
    covers: ids of requirements, over all parameters.
    world_sizes, at_least: as its mark has them; () and None for a case without ranks or mark.
    says: first sentence of the docstring, or "".
    """

    path: Path
    name: str
    line: int
    covers: frozenset[str]
    world_sizes: tuple[int, ...]
    at_least: int | None
    says: str


def cases_covering(id: str) -> list[Case]:
    """The cases that cover a requirement, in the order of their files."""
    named = (file for file in chapter_files() if id in ids_in(file))
    return [case for file in named for case in cases_in(file) if id in case.covers]


def cases_in(file: Path) -> Iterator[Case]:
    """Every case of a file of the suite."""
    module = ast.parse(text_of(file))
    values = dict(_assigned(module))
    written: dict[int, set[str]] = {}
    for rule in rules_in(file):
        written.setdefault(rule.line, set()).add(rule.requirement.id)
    for node in module.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            covers = {id for mark in node.decorator_list for id in _ids(mark, values, written)}
            yield _case(file, node, frozenset(covers))


def _case(file: Path, node: ast.FunctionDef, covers: frozenset[str]) -> Case:
    marks = {_name(mark.func): mark for mark in node.decorator_list if isinstance(mark, ast.Call)}
    sizes = marks.get("world_sizes")
    doc = ast.get_docstring(node) or ""
    return Case(
        path=file.relative_to(PACKAGE.parent),
        name=node.name,
        line=min([node.lineno, *(mark.lineno for mark in node.decorator_list)]),
        covers=covers,
        world_sizes=tuple(map(ast.literal_eval, sizes.args)) if sizes else (),
        at_least=next((ast.literal_eval(k.value) for k in sizes.keywords), None) if sizes else None,
        says=" ".join(doc.partition("\n\n")[0].split()),
    )


def _assigned(module: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Names of the module and the expressions that they stand for."""
    for node in module.body:
        if isinstance(node, ast.Assign):
            yield from ((_name(target), node.value) for target in node.targets)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            yield _name(node.target), node.value


def _ids(
    mark: ast.expr, values: Mapping[str, ast.expr], written: Mapping[int, set[str]]
) -> set[str]:
    """Ids of the rules that are written in a mark or that it covers, and in all that the module's
    names in it stand for.

    written: line -> ids of the rules that are written there.
    """
    found: set[str] = set()
    names: set[str] = set()
    waiting: list[ast.expr] = [mark]
    while waiting:
        for node in ast.walk(waiting.pop()):
            if isinstance(node, ast.Call) and _name(node.func) == "covers":
                found.update(map(ast.literal_eval, node.args))
            elif isinstance(node, ast.Call):
                found.update(written.get(node.lineno, ()))
            elif isinstance(node, ast.Name) and node.id in values.keys() - names:
                names.add(node.id)
                waiting.append(values[node.id])
    return found


def _name(node: ast.expr) -> str:
    """The last part of a name: "parametrize" of pytest.mark.parametrize."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
