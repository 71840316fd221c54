"""Extracts from the source of `script_runtime.py` what a stand-alone script needs to run its case.

[Note: what a script needs]
A line that ends in `#: word`, and the statement that begins in it, needs that word: a name or an
attribute that the case uses (`ranks.x` is an x of its ranks), or `with_x` or `without_x`, as the
script's target has an x other than that of `script_runtime.TARGET`, or has not. `#: not word` needs
that the script does without. Of definitions, those are there that others need; and of methods,
those that are looked up by their name.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable, Iterator, Set

from conformance.report import script_runtime

MAIN = "main"
_WRITTEN_ANEW = {"WORLD_SIZE", "TARGET", "case"}
_MARK = re.compile(r"  #: (not )?([\w.]+)$")
_FOR_CHECKERS = re.compile(r"  # (type: ignore|noqa)\S*(  # .*?)?(?=  #:|$)", re.MULTILINE)
_SOURCE = _FOR_CHECKERS.sub("", inspect.getsource(script_runtime))
_TREE = ast.parse(_SOURCE)
_BODY = _TREE.body[1:]  # without the docstring
_STARTS = {node.lineno: node for node in ast.walk(_TREE) if isinstance(node, ast.stmt)}


def import_lines() -> Iterator[str]:
    """Those of `script_runtime.py`, one for each name."""
    for statement in _BODY:
        if isinstance(statement, ast.Import):
            yield from (f"import {ast.unparse(alias)}" for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.module != "__future__":
            yield from (f"from {statement.module} import {a.name}" for a in statement.names)


def names() -> frozenset[str]:
    """What `script_runtime.py` defines."""
    return frozenset(map(_name, _BODY)) - {""}


def definitions(roots: Iterable[str], words: Set[str], facts: Set[str]) -> list[str]:
    """Source texts of these names, of `main`, which comes last, and of what they need.

    words: the names and attributes that the case uses, see `Sources.words`.
    facts: which of its facts are not those of `script_runtime.TARGET`.
    """
    given = {f"with_{f}" if f in facts else f"without_{f}" for f in vars(script_runtime.TARGET)}
    needed = {MAIN, *roots}
    lines = _cut({*words, *given})
    body = [s for s in ast.parse("\n".join(lines)).body if _name(s) not in _WRITTEN_ANEW]
    looked_up = set(words)
    before = 0
    while before < len(needed) + len(looked_up):
        before = len(needed) + len(looked_up)
        for part in [part for s in body if _name(s) in needed for part in _parts(s, looked_up)]:
            needed |= {node.id for node in ast.walk(part) if isinstance(node, ast.Name)}
            looked_up |= {node.attr for node in ast.walk(part) if isinstance(node, ast.Attribute)}
    texts: list[str] = []
    for statement, previous in zip(body, [None, *body], strict=False):
        if _name(statement) in needed:
            text = _text(lines, statement, looked_up)
            if _is_constant(statement) and _is_constant(previous) and texts:
                texts[-1] += f"\n{text}"  # constants stand together
            else:
                texts.append(text)
    return texts


def _cut(needs: Set[str]) -> list[str]:
    """The lines of `script_runtime.py` that need nothing else, without marks."""
    lines = _SOURCE.splitlines()
    kept = dict(enumerate(lines, 1))
    for number, line in enumerate(lines, 1):
        mark = _MARK.search(line)
        if mark and (mark[2] in needs) is not bool(mark[1]):
            kept[number] = line[: mark.start()]
        elif mark:
            last = _STARTS[number].end_lineno if number in _STARTS else number
            for gone in range(number, (last or number) + 1):
                kept.pop(gone, None)
    return list(kept.values())


def _name(statement: ast.stmt) -> str:
    """What a definition at the top level is there for, or ""."""
    if isinstance(statement, ast.ClassDef | ast.FunctionDef):
        return statement.name
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        return next(n.id for n in ast.walk(statement) if isinstance(n, ast.Name))
    return ""


def _is_constant(statement: ast.stmt | None) -> bool:
    return isinstance(statement, ast.Assign | ast.AnnAssign)


def _is_left_out(member: ast.AST, looked_up: Set[str]) -> bool:
    name = member.name if isinstance(member, ast.FunctionDef) else "__init__"
    return name not in looked_up and not name.startswith("__")


def _parts(statement: ast.stmt, looked_up: Set[str]) -> list[ast.AST]:
    if not isinstance(statement, ast.ClassDef):
        return [statement]
    return [n for n in ast.iter_child_nodes(statement) if not _is_left_out(n, looked_up)]


def _text(lines: list[str], statement: ast.stmt, looked_up: Set[str]) -> str:
    left_out: set[int] = set()
    for member in statement.body if isinstance(statement, ast.ClassDef) else ():
        if _is_left_out(member, looked_up):
            left_out |= set(range(_first(member) - 1, (member.end_lineno or 0) + 1))  # a blank, too
    numbers = range(_first(statement), (statement.end_lineno or 0) + 1)
    text = "\n".join(lines[n - 1] for n in numbers if n not in left_out).rstrip()
    return re.sub(r"\n\n\n+", "\n\n", text)


def _first(statement: ast.stmt) -> int:
    """Its first line, decorators included."""
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(decorator.lineno for decorator in decorators)])
