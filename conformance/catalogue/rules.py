"""The rules of the suite, read from the sources of its chapters.

Chapters import torch, which takes seconds; their rules are literals, constants and chapters, which
Python evaluates by themselves. `tests/test_tidiness.py` holds that importing gives the same.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partialmethod
from pathlib import Path
from types import CodeType
from typing import Any

from conformance.catalogue.chapters import chapter_files, named_in, text_of
from conformance.rule import MAY, MUST, SHOULD, Catalogue, Requirement, Shared

# A decorator or an assignment at the top level, with the lines that go on with it. To parse whole
# files would take ten times as long.
_STATEMENT = re.compile(r"^(?:@|[A-Za-z_]\w*(?:: .+?)? = ).*\n(?:(?:[ )\]}].*)?\n)*", re.MULTILINE)
_RULE = re.compile(r"\.(?:must|should|may)\(")
_LEVELS = ("must", "should", "may")


@dataclass(frozen=True, slots=True)
class Rule:
    """A requirement, and the file and the line (1 for the first) where it is written."""

    requirement: Requirement
    file: Path
    line: int


class _Chapter(Shared):
    """Stands for `conformance.Chapter` while sources are read."""

    must = partialmethod(Shared.rule, MUST)
    should = partialmethod(Shared.rule, SHOULD)
    may = partialmethod(Shared.rule, MAY)


def _chapter(profile: str, **shared: Any) -> _Chapter:
    return _Chapter(profile=profile, **shared)


@cache
def rules() -> Mapping[str, Rule]:
    """Every rule of the suite by its id, in the order of the files."""
    found: dict[str, Rule] = {}
    for file in chapter_files():
        for rule in rules_in(file):
            other = found.setdefault(rule.requirement.id, rule)
            if other is not rule:
                raise ValueError(f"{rule.requirement.id} is written in {other.file} and in {file}")
    return found


@cache
def catalogue() -> Catalogue:
    """Every requirement of the suite, and those that came with cases of others."""
    return Catalogue(rule.requirement for rule in rules().values())


def ids_in(file: Path) -> frozenset[str]:
    """The ids of all rules that the cases of a file cover, and of some that they may not."""
    return named_in(file) | {rule.requirement.id for rule in rules_in(file)}


@cache
def rules_in(file: Path) -> tuple[Rule, ...]:
    """The rules that a module writes down, from the first to the last."""
    return tuple(_rules_in(file))


def _rules_in(file: Path) -> Iterator[Rule]:
    text = text_of(file)
    names = _Names()
    line, at = 1, 0
    for match in _STATEMENT.finditer(text):
        statement = match.group()
        if not statement.startswith("@"):
            names.sources[re.match(r"\w+", statement).group()] = statement  # type: ignore[union-attr]  # the pattern begins so
        if not _RULE.search(statement):
            continue
        line, at = line + text.count("\n", at, match.start()), match.start()
        for node in _expressions(ast.parse(statement.removeprefix("@"))):
            value = names.value(node)
            call = next(filter(_writes_a_rule, ast.walk(node)))
            assert isinstance(call, ast.Call)
            for requirement in value if isinstance(value, list) else [value]:
                yield Rule(requirement, file, line + call.lineno - 1)


def _expressions(node: ast.AST) -> Iterator[ast.expr]:
    """Calls that write a rule, and comprehensions that make such calls."""
    makes_some = isinstance(node, ast.ListComp) and any(map(_writes_a_rule, ast.walk(node)))
    if isinstance(node, ast.expr) and (makes_some or _writes_a_rule(node)):
        yield node
    else:
        for child in ast.iter_child_nodes(node):
            yield from _expressions(child)


def _writes_a_rule(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in _LEVELS
    )


class _Names:
    """The module's names that its rules use.

    sources: the last assignment to each name.
    """

    def __init__(self) -> None:
        self.sources: dict[str, str] = {}
        self._values: dict[str, Any] = {"__builtins__": {}, "Chapter": _chapter}

    def value(self, expression: ast.expr) -> Any:
        for node in ast.walk(expression):
            if isinstance(node, ast.Name) and node.id not in self._values:
                self._define(node.id)
        code: CodeType = compile(ast.Expression(expression), "<rule>", "eval")
        return eval(code, self._values)

    def _define(self, name: str) -> None:
        if name in self.sources:  # others are variables of a comprehension
            [statement] = ast.parse(self.sources[name]).body
            assert isinstance(statement, ast.Assign | ast.AnnAssign)
            assert statement.value is not None
            self._values[name] = self.value(statement.value)
