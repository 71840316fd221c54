"""Loads a package in a rank with one mutation, or so that it notes which of its lines are run.

Ranks import this module before the target's own; the environment says what to do. Files stay as
they are, and nothing that is compiled here is kept.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType

from conformance.power.reach import REACHED, Marks
from conformance.power.source_mutations import mutated

# "module:mutation"
MUTATION = "CONFORMANCE_SOURCE_MUTATION"
# A package of whose lines those are marked that are run, as `first_lines` counts them.
NOTING = "CONFORMANCE_SOURCE_NOTING"

_MARKS = "__conformance_reached__"
_CACHES = {"cache", "lru_cache"}
_HAS_STATEMENTS = (
    *(ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.Match),
    *(ast.ExceptHandler, ast.match_case),
)


def modules_of(package: str) -> dict[str, Path]:
    """The dotted names of all modules of a package, sorted, with their files.

    Raises ModuleNotFoundError if it has no source here.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.has_location or spec.origin is None:
        raise ModuleNotFoundError(f"no source of {package!r} is found", name=package)
    if not spec.submodule_search_locations:
        return {package: Path(spec.origin)}
    folder = Path(spec.origin).parent
    found = {}
    for path in folder.rglob("*.py"):
        below = path.relative_to(folder).with_suffix("").parts
        found[".".join((package, *below)).removesuffix(".__init__")] = path
    return dict(sorted(found.items()))


def first_lines(package: str) -> tuple[dict[str, int], int]:
    """Where the lines of each module begin if all are counted through, and how many there are."""
    begins, count = {}, 0
    for module, path in modules_of(package).items():
        begins[module] = count
        count += len(path.read_text(encoding="utf-8").splitlines()) + 1  # lines count from 1
    return begins, count


def with_marks(source: str, begins: int) -> ast.Module:
    """The module, in whose functions each statement first notes that it is run.

    What functions keep of earlier calls is computed again: a case is to show all that it needs.
    """
    tree = ast.parse(source)
    for function in list(ast.walk(tree)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            function.decorator_list = [d for d in function.decorator_list if not _is_cache(d)]
            _mark(function, begins)
    return ast.fix_missing_locations(tree)


def _is_cache(decorator: ast.expr) -> bool:
    named = decorator.func if isinstance(decorator, ast.Call) else decorator
    name = named.attr if isinstance(named, ast.Attribute) else getattr(named, "id", "")
    return name in _CACHES


def _mark(node: ast.AST, begins: int) -> None:
    """Mark the statements below a node, but for those of functions and classes in it."""
    for field, value in ast.iter_fields(node):
        children = value if isinstance(value, list) and field != "decorator_list" else []
        for child in children:
            if isinstance(child, _HAS_STATEMENTS):
                _mark(child, begins)
        if children and isinstance(children[0], ast.stmt):
            setattr(node, field, [new for one in children for new in _marked(one, begins)])


def _marked(statement: ast.stmt, begins: int) -> list[ast.stmt]:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return [statement]  # a docstring, which must come first
    [mark] = ast.parse(f"{_MARKS}[{begins + statement.lineno}] = 1").body
    return [ast.copy_location(mark, statement), statement]


class _Loader(SourceFileLoader):
    """Loads what a function makes of the source; keeps nothing for the next process."""

    def __init__(
        self,
        module: str,
        path: str,
        change: Callable[[str], ast.Module],
        marks: Marks | None = None,
    ) -> None:
        super().__init__(module, path)
        self._change = change
        self._marks = marks

    def get_code(self, fullname: str) -> object:  # type: ignore[override]  # CodeType, with a tree
        source = Path(self.path).read_text(encoding="utf-8")
        return compile(self._change(source), self.path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        if self._marks is not None:
            vars(module)[_MARKS] = self._marks.memory
        super().exec_module(module)


class _Finder(MetaPathFinder):
    """Finds modules as Python does, and gives some of them another loader."""

    def __init__(self, loader_of: Callable[[str, str], _Loader | None]) -> None:
        self._loader_of = loader_of

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target)
        loader = self._loader_of(fullname, spec.origin) if spec and spec.origin else None
        if spec is None or loader is None:
            return None
        spec.loader = loader
        return spec


def _loading_mutation(wanted: str) -> _Finder:
    module, _, name = wanted.partition(":")

    def loader_of(fullname: str, path: str) -> _Loader | None:
        return _Loader(fullname, path, lambda s: mutated(s, name)) if fullname == module else None

    return _Finder(loader_of)


def _noting_lines(package: str) -> _Finder:
    begins, count = first_lines(package)
    marks = Marks(os.environ[REACHED], count)

    def loader_of(fullname: str, path: str) -> _Loader | None:
        if fullname not in begins:
            return None
        return _Loader(fullname, path, lambda s: with_marks(s, begins[fullname]), marks)

    return _Finder(loader_of)


def _install() -> None:
    for variable, make in ((MUTATION, _loading_mutation), (NOTING, _noting_lines)):
        wanted = os.environ.get(variable)
        if wanted:
            loaded = wanted.partition(":")[0]
            if any(name == loaded or name.startswith(f"{loaded}.") for name in sys.modules):
                raise RuntimeError(f"{loaded} was imported before it could be changed")
            sys.meta_path.insert(0, make(wanted))


_install()
