"""The part of every stand-alone script that starts ranks: the text of `alone.py`, cut to need."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import fields

from conformance.report import alone
from conformance.report.script_source import CannotStandAlone

# What only some functions of ranks use, and the driver itself does not.
_OPTIONAL = ("generator", "options", "ddp", "fsdp", "sync_batchnorm")
_FOR_WRAPPERS = "taken"
_TARGET = {f"target.{field.name}" for field in fields(alone.Target)}


class Driver:
    """The definitions and imports of `alone.py`.

    imports: one line for each name.
    names: what it defines.
    """

    def __init__(self) -> None:
        source = inspect.getsource(alone)
        self._lines = source.splitlines()
        body = ast.parse(source).body[1:]  # without the docstring
        self._definitions = [s for s in body if not isinstance(s, ast.Import | ast.ImportFrom)]
        self.imports = frozenset(_import_lines(body))
        self.names = frozenset(_names(self._definitions))

    def definitions(self, used: frozenset[str]) -> list[str]:
        """Source texts for a script whose code looks up these attributes (see `Sources`).

        Raises CannotStandAlone when that code asks for more than a script's `Me` has.
        """
        beyond = {name for name in used if name.startswith("target.")} - _TARGET
        if beyond:
            raise CannotStandAlone(f"it looks at me.{min(beyond)}")
        texts: list[str] = []
        for statement in self._definitions:
            is_for_wrappers = getattr(statement, "name", "") == _FOR_WRAPPERS
            if is_for_wrappers and used.isdisjoint({"ddp", "fsdp"}):
                continue
            text = self._text(statement, used)
            if isinstance(statement, ast.Assign) and texts and "\n" not in texts[-1]:
                texts[-1] += f"\n{text}"  # constants stand together
            else:
                texts.append(text)
        return texts

    def _text(self, statement: ast.stmt, used: frozenset[str]) -> str:
        left_out: set[int] = set()
        if isinstance(statement, ast.ClassDef) and statement.name == "Me":
            for member in statement.body:
                if isinstance(member, ast.FunctionDef) and member.name in set(_OPTIONAL) - used:
                    first, last = _span(member)
                    left_out |= set(range(first - 1, last + 1))  # and the blank line before
        first, last = _span(statement)
        while self._lines[first - 2].startswith("#"):
            first -= 1
        return "\n".join(
            self._lines[n - 1] for n in range(first, last + 1) if n not in left_out
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
