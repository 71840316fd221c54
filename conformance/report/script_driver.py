"""The part of every stand-alone script that runs the case: the text of `alone.py`, cut to need."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Iterator
from dataclasses import fields

from conformance.report import alone
from conformance.report.script_source import CannotStandAlone

MAIN = "run_case"
# Members that only some cases use, and the rest of `alone.py` does not.
_OPTIONAL = frozenset(
    {"generator", "options", "ddp", "fsdp", "sync_batchnorm", "outcomes", "outcomes_each", "is_a"}
)
_OF_TARGET = {f"target.{field.name}" for field in fields(alone.World)}


class Driver:
    """The definitions and imports of `alone.py`.

    imports: one line for each name.
    names: what it defines.
    """

    def __init__(self) -> None:
        source = inspect.getsource(alone)
        self._lines = source.splitlines()
        body = ast.parse(source).body[1:]  # without the docstring
        definitions = [s for s in body if not isinstance(s, ast.Import | ast.ImportFrom)]
        self._definitions = {name: s for s in definitions for name in _names([s])}
        self.imports = frozenset(_import_lines(body))
        self.names = frozenset(self._definitions)

    def definitions(self, roots: Iterable[str], attributes: frozenset[str]) -> list[str]:
        """Source texts of these names, and of what they need.

        attributes: what the case looks up on anything, see `Sources.attributes`.
        Raises CannotStandAlone when the case asks for more of its target than a script has.
        """
        of_target = {name for name in attributes if name.startswith("target.")}
        if of_target - _OF_TARGET:
            raise CannotStandAlone(f"it looks at me.{min(of_target - _OF_TARGET)}")
        left_out = _OPTIONAL - attributes - self._used_by_members(attributes)
        needed: set[str] = set()
        new = {MAIN, *roots}
        while new:
            needed |= new
            used = {name for root in new for name in self._used_by(root, left_out)}
            new = used & self.names - needed
        texts: list[str] = []
        for name, statement in self._definitions.items():
            if name not in needed:
                continue
            text = self._text(statement, left_out)
            if isinstance(statement, ast.Assign) and texts and "\n" not in texts[-1]:
                texts[-1] += f"\n{text}"  # constants stand together
            else:
                texts.append(text)
        return texts

    def _used_by_members(self, attributes: frozenset[str]) -> set[str]:
        """What the optional members among these look up."""
        members = (m for s in self._definitions.values() for m in getattr(s, "body", ()))
        kept = [m for m in members if getattr(m, "name", "") in _OPTIONAL & attributes]
        return {n.attr for m in kept for n in ast.walk(m) if isinstance(n, ast.Attribute)}

    def _used_by(self, name: str, left_out: frozenset[str]) -> Iterator[str]:
        """Names that a definition uses when it runs, without its optional members."""
        statement = self._definitions[name]
        members = statement.body if isinstance(statement, ast.ClassDef) else [statement]
        for member in members:
            if getattr(member, "name", "") not in left_out:
                yield from (n.id for n in ast.walk(member) if isinstance(n, ast.Name))

    def _text(self, statement: ast.stmt, left_out: frozenset[str]) -> str:
        lines_left_out: set[int] = set()
        if isinstance(statement, ast.ClassDef):
            for member in statement.body:
                if isinstance(member, ast.FunctionDef) and member.name in left_out:
                    first, last = _span(member)
                    lines_left_out |= set(range(first - 1, last + 1))  # and the blank line before
        first, last = _span(statement)
        return "\n".join(
            self._lines[n - 1] for n in range(first, last + 1) if n not in lines_left_out
        ).rstrip()


def _span(statement: ast.stmt) -> tuple[int, int]:
    """First and last line, decorators included."""
    decorators = getattr(statement, "decorator_list", [])
    first = min([statement.lineno, *(d.lineno for d in decorators)])
    return first, statement.end_lineno or statement.lineno


def _import_lines(body: list[ast.stmt]) -> Iterator[str]:
    for statement in body:
        if isinstance(statement, ast.Import):
            yield from (f"import {_as(alias)}" for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.module != "__future__":
            yield from (f"from {statement.module} import {_as(a)}" for a in statement.names)


def _as(alias: ast.alias) -> str:
    return f"{alias.name} as {alias.asname}" if alias.asname else alias.name


def _names(statements: list[ast.stmt]) -> Iterator[str]:
    for statement in statements:
        if isinstance(statement, ast.ClassDef | ast.FunctionDef):
            yield statement.name
        elif isinstance(statement, ast.Assign):
            yield from (target.id for target in statement.targets if isinstance(target, ast.Name))
