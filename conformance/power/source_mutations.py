"""Small changes of a Python source that a careless author might have made, found in its syntax."""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_RELATIONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
# Fields of a node that say what something is, and not what it does.
_DESCRIPTIONS = {"annotation", "returns", "type_params", "decorator_list", "bases"}
# Functions whose first two arguments, swapped, are an error at once, or make no difference.
_NOT_SWAPPED = {
    *("isinstance", "issubclass", "getattr", "hasattr", "setattr", "cast", "TypeVar"),
    *("min", "max"),
}


@dataclass(frozen=True, slots=True)
class Mutation:
    """One change.

    name: an identifier that tells it from all others of its module.
    kind: its key in `KINDS`.
    line, column: where the changed part begins; lines count from 1, columns from 0.
    number: of those of one kind at one place, from 1 on.
    statement_line: where the statement begins that has it; 0 if it runs when the module is
        imported.
    before, after: the first line of the changed part.
    """

    name: str
    kind: str
    line: int
    column: int
    number: int
    statement_line: int
    before: str
    after: str


def mutations(source: str) -> list[Mutation]:
    """All mutations of a module, in the order of its text."""
    found = (change.described() for change in _changes(ast.parse(source)))
    return sorted(found, key=lambda m: (m.line, m.column, m.kind, m.number))


def mutated(source: str, name: str) -> ast.Module:
    """The module with the mutation of this name. Raises KeyError if it has none."""
    tree = ast.parse(source)
    for change in _changes(tree):
        if change.name == name:
            change.make()
            return ast.fix_missing_locations(tree)
    raise KeyError(name)


@dataclass(frozen=True, slots=True)
class _Place:
    """A node and what it is part of; statement_line as in `Mutation`."""

    node: ast.stmt | ast.expr
    parent: ast.AST
    field: str
    index: int | None
    statement_line: int


@dataclass(frozen=True, slots=True)
class _Change:
    """What may stand in a place; kind and number as in `Mutation`."""

    kind: str
    number: int
    place: _Place
    other: ast.AST

    @property
    def name(self) -> str:
        node, number = self.place.node, "" if self.number == 1 else f"_{self.number}"
        return f"line_{node.lineno}_{node.col_offset}_{self.kind}{number}"

    def described(self) -> Mutation:
        node = self.place.node
        said = _first_line(node), _first_line(self.other)
        at = node.lineno, node.col_offset, self.number, self.place.statement_line
        return Mutation(self.name, self.kind, *at, *said)

    def make(self) -> None:
        """Change the tree."""
        place, other = self.place, ast.copy_location(self.other, self.place.node)
        if place.index is None:
            setattr(place.parent, place.field, other)
        else:
            getattr(place.parent, place.field)[place.index] = other


def _changes(tree: ast.Module) -> Iterator[_Change]:
    """All of a tree, which stays as it is until one of them is made."""
    seen: Counter[tuple[str, int, int]] = Counter()
    for place in list(_places(tree, in_function=False, statement_line=0)):
        for kind, mutate in KINDS.items():
            for other in mutate(place.node):
                at = kind, place.node.lineno, place.node.col_offset
                seen[at] += 1
                yield _Change(kind, seen[at], place, other)


def _first_line(node: ast.AST) -> str:
    """Of a statement that has others, what stands before them."""
    if isinstance(node, ast.If | ast.While):
        node = _changed(node, body=[ast.Pass()], orelse=[])
    return ast.unparse(ast.fix_missing_locations(copy.deepcopy(node))).splitlines()[0]


def _places(parent: ast.AST, *, in_function: bool, statement_line: int) -> Iterator[_Place]:
    """All statements and expressions below this node that do something."""
    is_function = isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef)
    for field, value in ast.iter_fields(parent):
        if field in _DESCRIPTIONS:
            continue
        inside = in_function or (is_function and field == "body")
        for index, node in enumerate(value if isinstance(value, list) else [value]):
            if not isinstance(node, ast.AST) or _does_nothing(node):
                continue
            line = node.lineno if inside and isinstance(node, ast.stmt) else statement_line
            if isinstance(node, ast.stmt | ast.expr):
                at = index if isinstance(value, list) else None
                yield _Place(node, parent, field, at, line)
            yield from _places(node, in_function=inside, statement_line=line)


def _does_nothing(node: ast.AST) -> bool:
    """Whether it imports, documents or checks itself, so that no change of it is a bug."""
    match node:
        case ast.Import() | ast.ImportFrom() | ast.Assert():
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case ast.Expr(value=ast.Constant()):
            return True
        case ast.Assign(targets=[ast.Name(id="__all__" | "__slots__")]) | ast.keyword(arg="strict"):
            return True
    return False


def _changed(node: ast.AST, **fields: object) -> ast.AST:
    """A copy that shares all other children."""
    other = copy.copy(node)
    for field, value in fields.items():
        setattr(other, field, value)
    return other


def _relation(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield _changed(node, ops=[_RELATIONS[type(node.ops[0])]()])


def _arithmetic(node: ast.AST) -> Iterator[ast.AST]:
    if not isinstance(node, ast.BinOp | ast.AugAssign) or type(node.op) not in _ARITHMETIC:
        return
    operands = [node.left, node.right] if isinstance(node, ast.BinOp) else [node.value]
    if not any(map(_is_text_or_type, operands)):
        yield _changed(node, op=_ARITHMETIC[type(node.op)]())


def _is_text_or_type(node: ast.AST) -> bool:
    """Of `"rank " + name`, or `int | None`."""
    match node:
        case ast.JoinedStr() | ast.Constant(value=str() | None):
            return True
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name[:1].isupper() and not name.isupper()
    return False


def _logic(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.BoolOp):
        yield _changed(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())


def _condition(node: ast.AST) -> Iterator[ast.AST]:
    """Negations, but for those that `relation` or `sign` makes."""
    if not isinstance(node, ast.If | ast.While | ast.IfExp):
        return
    is_one = isinstance(node.test, ast.Compare) and len(node.test.ops) == 1
    if not is_one and not isinstance(node.test, ast.UnaryOp):
        yield _changed(node, test=ast.UnaryOp(ast.Not(), node.test))


def _number(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Constant(value=bool()):
            return
        case ast.Constant(value=int() | float() as value):
            yield _changed(node, value=value + 1)


def _flag(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield _changed(node, value=not node.value)


def _sign(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not | ast.Invert):
        yield node.operand


def _statement(node: ast.AST) -> Iterator[ast.AST]:
    """What is done without a new name is not done."""
    match node:
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Raise():
            yield ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) | ast.Delete():
            yield ast.Pass()
        case ast.Return(value=ast.expr() as value):
            if not (isinstance(value, ast.Constant) and value.value is None):
                yield ast.Return(None)
        case ast.Break():
            yield ast.Continue()
        case ast.Continue():
            yield ast.Break()


def _arguments(node: ast.AST) -> Iterator[ast.AST]:
    """The first two are swapped."""
    if not isinstance(node, ast.Call) or len(node.args) < 2:
        return
    first, second, *rest = node.args
    is_apart = isinstance(node.func, ast.Name) and node.func.id in _NOT_SWAPPED
    has_list = isinstance(first, ast.Starred) or isinstance(second, ast.Starred)
    if not is_apart and not has_list and ast.dump(first) != ast.dump(second):
        yield _changed(node, args=[second, first, *rest])


def _text(node: ast.AST) -> Iterator[ast.AST]:
    """One of the values in a text, such as an error's, is left out."""
    if isinstance(node, ast.JoinedStr):
        for index, part in enumerate(node.values):
            if isinstance(part, ast.FormattedValue):
                yield _changed(node, values=[*node.values[:index], *node.values[index + 1 :]])


# What is done to a node; each yields what may stand in its place.
KINDS: dict[str, Callable[[ast.AST], Iterator[ast.AST]]] = {
    "relation": _relation,
    "arithmetic": _arithmetic,
    "logic": _logic,
    "condition": _condition,
    "number": _number,
    "flag": _flag,
    "sign": _sign,
    "statement": _statement,
    "arguments": _arguments,
    "text": _text,
}
