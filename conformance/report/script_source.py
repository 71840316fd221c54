"""Collects the source that a function needs to run elsewhere: helpers, classes, constants, imports.

[Note: what is copied]
Names are followed from a function through the modules that will not be there: those that
`is_copied` says. What such a module defines is copied as it stands; what it imports from elsewhere
becomes an import. A name that cannot be followed raises CannotStandAlone: half a script helps
nobody.
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
import inspect
import symtable
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from types import FunctionType, ModuleType
from typing import TypeGuard

_STATEMENTS = 4096  # that are looked at once, although many scripts need them


class CannotStandAlone(Exception):
    """Why something cannot be written into a script of its own."""


@dataclass(frozen=True, slots=True)
class _Origin:
    """What a name of the script stands for: a name of a module."""

    module: str
    name: str


class Sources:
    """Gathers definitions and imports; `definitions` come in an order in which they can run.

    is_copied: whether a module of this name will not be there.
    given: names that the script has anyway, by the module and name that they stand for.
    taken: names that the script uses itself, which nothing else may have.
    imports: the script's own import lines; those of the copied code are added.
    given_and_used: which of the names that are given anyway the copied code uses.
    aliases_of_given: lines that must come after what is given, and so after `definitions`.
    """

    def __init__(
        self,
        is_copied: Callable[[str], bool],
        given: Mapping[tuple[str, str], str],
        taken: frozenset[str],
        imports: Iterable[str],
    ) -> None:
        self.is_copied = is_copied
        self._given = {_Origin(*origin): name for origin, name in given.items()}
        self._taken = taken
        self.given_and_used: set[str] = set()
        self.imports = set(imports)
        self._origins = {_bound_by_line(line): _Origin("", line) for line in self.imports}
        self._done: set[tuple[str, int]] = set()
        self._namespaces: dict[str, dict[str, str]] = {}
        self._definitions: list[str] = []
        self.aliases_of_given: list[str] = []
        self._nodes: list[ast.AST] = []

    def definitions(self) -> list[str]:
        """Source texts, each after those that it needs."""
        namespaces = [
            f"{alias} = SimpleNamespace({', '.join(f'{n}={v}' for n, v in sorted(names.items()))})"
            for alias, names in self._namespaces.items()
        ]
        if namespaces:
            self.imports.add("from types import SimpleNamespace")
        return [*self._definitions, *namespaces]

    def words(self) -> frozenset[str]:
        """Names, attributes and keywords of the copied code.

        An attribute of an attribute also comes as "one.other"; one of any ranks, as "ranks.other".
        """
        found = set()
        for node in (node for tree in self._nodes for node in ast.walk(tree)):
            if isinstance(node, ast.Name):
                found.add(node.id)
            elif isinstance(node, ast.keyword):
                found.add(node.arg or "")
            elif isinstance(node, ast.Attribute):
                found.add(node.attr)
                if isinstance(node.value, ast.Attribute):
                    found.add(f"{node.value.attr}.{node.attr}")
                elif isinstance(node.value, ast.Name) and node.value.id.endswith("ranks"):
                    found.add(f"ranks.{node.attr}")
        return frozenset(found)

    def note(self, text: str) -> None:
        """Count a text of the script's own among the copied code."""
        self._nodes.append(ast.parse(text))

    def is_given(self, kind: type) -> bool:
        """Whether the script has something else under the name of this class."""
        return _Origin(kind.__module__, kind.__qualname__) in self._given

    def need_case(self, case: FunctionType, drawn: str) -> str:
        """Have the function of a case, without what pytest and Hypothesis do with it.

        drawn: its parameter by which it draws values while it runs, or "": the script has the
            values there, in their order.
        """
        module, name = case.__module__, case.__qualname__
        statement = _bindings(module).get(name)
        if not isinstance(statement, ast.FunctionDef):
            raise CannotStandAlone(f"{name} is not defined at the top level of {module}")
        text = _without_draws(module, statement, drawn) if drawn else _body_of(module, statement)
        self._claim(name, _Origin(module, name))
        [bare] = ast.parse(text).body
        self._nodes.append(bare)
        self._need_names_in(module, bare)
        self._definitions.append(text)
        return name

    def need(self, thing: FunctionType | type) -> str:
        """The expression by which the script reaches a function or a class."""
        module, qualname = thing.__module__, thing.__qualname__
        if module == "builtins":
            return qualname
        if "<" in qualname:
            raise CannotStandAlone(f"{qualname} is not defined at the top level of {module}")
        if not self.is_copied(module):
            self.imports.add(f"import {module}")
            return f"{module}.{qualname}"
        first, _, rest = qualname.partition(".")
        name = self._need(module, first)
        return f"{name}.{rest}" if rest else name

    def need_given(self, name: str) -> str:
        """Have what is given by this name; returns the name."""
        self.given_and_used.add(name)
        return name

    def _need(self, module: str, name: str) -> str:
        """Have what `name` means in a copied module; returns its name in the script."""
        origin = _Origin(module, name)
        if origin in self._given:
            return self.need_given(self._given[origin])
        statement = _bindings(module).get(name)
        if statement is None:
            raise CannotStandAlone(f"where {module} has {name!r} from cannot be told")
        if isinstance(statement, ast.Import | ast.ImportFrom):
            return self._need_import(module, name, statement)
        self._claim(name, origin)
        if (module, id(statement)) not in self._done:
            self._done.add((module, id(statement)))
            self._nodes.append(statement)
            self._need_names_in(module, statement)
            self._definitions.append(_text(module, statement))
        return name

    def _need_names_in(self, module: str, statement: ast.stmt) -> None:
        bare = _without_annotations(statement)
        for name in _names_from_outside(bare):
            if name in _bindings(module):
                imported = self._copied_module(module, name)
                if imported is None:
                    self._need_as(module, name)
                else:
                    self._need_namespace(name, imported, bare)
            elif not hasattr(builtins, name):
                raise CannotStandAlone(f"where {module} has {name!r} from cannot be told")
        for node in ast.walk(bare):
            if isinstance(node, ast.Import | ast.ImportFrom):
                for alias in node.names:
                    source = _source_of(module, node, alias)
                    if self.is_copied(source):
                        raise CannotStandAlone(f"it imports {source} while it runs")

    def _need_as(self, module: str, name: str) -> None:
        """As `_need`, and reachable by this very name."""
        found = self._need(module, name)
        if found != name:
            self._claim(name, _Origin(module, name))
            alias = f"{name} = {found}"
            aliases = self._definitions
            if found in self._given.values():
                aliases = self.aliases_of_given
            if alias not in aliases:
                aliases.append(alias)

    def _need_namespace(self, alias: str, module: str, tree: ast.AST) -> None:
        """A copied module that is used as `alias.name`: the script gathers those names in one."""
        self._claim(alias, _Origin(module, ""))
        names = self._namespaces.setdefault(alias, {})
        looked_up = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
        for node in looked_up:
            if isinstance(node.value, ast.Name) and node.value.id == alias:
                names[node.attr] = self._need(module, node.attr)

    def _need_import(self, module: str, name: str, statement: ast.Import | ast.ImportFrom) -> str:
        alias = next(a for a in statement.names if _bound(a) == name)
        source = _source_of(module, statement, alias)
        if self.is_copied(source):
            if isinstance(statement, ast.Import):
                raise CannotStandAlone(f"{module} imports {alias.name} as a whole")
            return self._need(source, alias.name)
        if isinstance(statement, ast.Import):
            line = f"import {alias.name}"
        else:
            line = f"from {source} import {alias.name}"
        line += f" as {alias.asname}" if alias.asname else ""
        if line not in self.imports:
            self._claim(name, _Origin("", line))
            self.imports.add(line)
        return name

    def _copied_module(self, module: str, name: str) -> str | None:
        """The copied module that this name stands for, if it stands for one."""
        value = getattr(sys.modules[module], name, None)
        if isinstance(value, ModuleType) and self.is_copied(value.__name__):
            return value.__name__
        return None

    def _claim(self, name: str, origin: _Origin) -> None:
        if name in self._taken or self._origins.setdefault(name, origin) != origin:
            raise CannotStandAlone(f"two things that it needs are called {name!r}")


@cache
def _source(module: str) -> str:
    try:
        return inspect.getsource(sys.modules[module])
    except (OSError, TypeError, KeyError) as error:
        raise CannotStandAlone(f"the source of {module} is not at hand") from error


@cache
def _bindings(module: str) -> Mapping[str, ast.stmt]:
    """Top-level name -> the last statement that binds it."""
    found = {}
    body = ast.parse(_source(module)).body
    for statement in [inner for outer in body for inner in _for_type_checkers(outer)]:
        for name in _bound_by(statement):
            found[name] = statement
    return found


def _for_type_checkers(statement: ast.stmt) -> list[ast.stmt]:
    """What `if TYPE_CHECKING:` holds, which says where a lazily imported name comes from."""
    if isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING":
        return statement.body
    return [statement]


def _bound_by(statement: ast.stmt) -> Iterator[str]:
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            yield statement.name
        case ast.Import() | ast.ImportFrom():
            yield from map(_bound, statement.names)
        case ast.Assign() | ast.AnnAssign() | ast.AugAssign():
            for node in ast.walk(statement):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    yield node.id
        case ast.If() | ast.Try():
            for inner in ast.iter_child_nodes(statement):
                if isinstance(inner, ast.stmt):
                    yield from _bound_by(inner)


def _bound_by_line(line: str) -> str:
    [statement] = ast.parse(line).body
    return next(_bound_by(statement))


def _bound(alias: ast.alias) -> str:
    return alias.asname or alias.name.partition(".")[0]


def _source_of(module: str, statement: ast.Import | ast.ImportFrom, alias: ast.alias) -> str:
    """The module that an import takes something from."""
    if isinstance(statement, ast.Import):
        return alias.name
    package = sys.modules[module].__package__ or ""
    relative = "." * statement.level + (statement.module or "")
    return importlib.util.resolve_name(relative, package)


def _text(module: str, statement: ast.stmt) -> str:
    """The statement as it is written, with its decorators and the comment right above it.

    Of docstrings, only the first paragraph.
    """
    lines = _source(module).splitlines()
    decorators = getattr(statement, "decorator_list", [])
    first = min([statement.lineno, *(d.lineno for d in decorators)])
    while first > 1 and lines[first - 2].startswith("#"):
        first -= 1
    left_out: set[int] = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
            start, end = node.body[0].lineno, node.body[0].end_lineno or 0
            blank = next((n for n in range(start, end) if not lines[n - 1]), None)
            if blank is not None:
                lines[blank - 2] += '"""'
                left_out |= set(range(blank, end + 1))
    last = (statement.end_lineno or first) + 1
    return "\n".join(lines[n - 1] for n in range(first, last) if n not in left_out)


def _body_of(module: str, statement: ast.stmt) -> str:
    """The statement as it is written, without decorators."""
    return "\n".join(_source(module).splitlines()[statement.lineno - 1 : statement.end_lineno])


def _without_draws(module: str, statement: ast.FunctionDef, drawn: str) -> str:
    """The function, with `next(data)` for each `data.draw(...)`."""
    lines = _body_of(module, statement).splitlines()
    draws = [node for node in ast.walk(statement) if _is_draw(node, drawn)]
    uses = [n for n in ast.walk(statement) if isinstance(n, ast.Name) and n.id == drawn]
    if len(uses) > len(draws):
        raise CannotStandAlone(f"{statement.name} hands on what draws its values")
    for node in sorted(draws, key=lambda node: (node.lineno, node.col_offset), reverse=True):
        first, last = node.lineno - statement.lineno, (node.end_lineno or 0) - statement.lineno
        before = lines[first].encode()[: node.col_offset].decode()
        after = lines[last].encode()[node.end_col_offset :].decode()
        lines[first : last + 1] = [f"{before}next({drawn}){after}"]
    return "\n".join(lines)


def _is_draw(node: ast.AST, drawn: str) -> TypeGuard[ast.Call]:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "draw"
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == drawn
    )


class _Bare(ast.NodeTransformer):
    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant("")
        return self.generic_visit(node)


@lru_cache(_STATEMENTS)
def _without_annotations(statement: ast.stmt) -> ast.stmt:
    """A copy without annotations, which the script never evaluates."""
    copy = ast.parse(ast.unparse(statement)).body[0]
    bare: ast.stmt = _Bare().visit(copy)
    return bare


@lru_cache(_STATEMENTS)
def _names_from_outside(statement: ast.stmt) -> Sequence[str]:
    """The global names that a statement uses, wherever in it."""
    table = symtable.symtable(ast.unparse(statement), "<copied>", "exec")
    names = {s.get_name() for s in table.get_symbols() if s.is_referenced()}
    tables = list(table.get_children())
    while tables:
        inner = tables.pop()
        names |= {s.get_name() for s in inner.get_symbols() if s.is_global()}
        tables += inner.get_children()
    return tuple(sorted(names - {"__name__"} - set(_bound_by(statement))))
