"""Which part may import which, read from the sources."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Part -> the parts that it may import, besides itself. A part is a module or a package right below
# the top. A name with a dot is part of its package and has rules of its own.
CONFORMANCE = {
    # Facts and words: nothing below them.
    "verdict": "",
    "version": "",
    "exit_codes": "",
    "torch_private": "",
    "capabilities": "",
    "requirements": "",
    # What is tested, what must come out, how that is compared. Pure, but for `target`.
    "target": "verdict capabilities requirements",
    "oracle": "",
    "checks": "",
    # Processes.
    "harness": "verdict target torch_private checks",
    # What cases are written with; `__init__` hands it out.
    "markers": "capabilities requirements",
    "__init__": "checks harness markers",
    "cases": "__init__ verdict capabilities requirements target oracle checks harness markers "
    "torch_private",
    # A run: its options, what is run, how it is judged.
    "settings": "requirements target",
    "first_look": "target",
    "options": "settings",
    "properties": "",
    "board": "requirements",
    "plan": "capabilities requirements settings target verdict",
    "judgement": "harness plan target verdict",
    "report": "verdict version requirements target checks harness settings",
    "selection": "plan settings",
    # What puts it all together.
    "certifier": "board exit_codes first_look plan report requirements settings",
    "plugin": "board certifier harness judgement markers options plan properties report selection "
    "settings verdict",
    "conftest": "plugin properties",
    "bench": "exit_codes harness target capabilities oracle checks",
    "cli": "__init__ capabilities exit_codes options report requirements settings target version",
    "__main__": "exit_codes settings version",
}
IMPL = {
    "errors": "",
    "torch_private": "",
    "torch_dispatch": "",
    "schedules": "errors",
    "transport": "errors schedules torch_private",
    "gloo": "errors schedules transport torch_private torch_dispatch",
    "testing": "errors schedules transport gloo ddp fsdp torch_private",
    # These run on any backend, so they know torch.distributed alone.
    "ddp": "errors torch_private torch_dispatch",
    "sync_batchnorm": "errors torch_private",
    "fsdp": "errors torch_private",
    "__init__": "",
}

# Imported by name when a command or a file is asked for; no import statement shows it.
ENTRY_POINTS = {
    "conformance.__main__",
    "conformance.conftest",
    "conformance.plugin",
    "conformance.harness.preload",
}


@cache
def modules(package: str) -> dict[str, Path]:
    """Every module of a package: dotted name -> file."""
    found = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports(path: Path) -> list[tuple[int, str]]:
    """Line and dotted name of everything that a file imports, in functions too."""
    package = path.relative_to(ROOT).parent.parts
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            source = ".".join([*base, *([node.module] if node.module else [])])
            found += [(node.lineno, f"{source}.{alias.name}") for alias in node.names]
    return found


def part(package: str, name: str) -> str:
    """The part of a package that a dotted name belongs to; "" for another package."""
    top, *rest = name.split(".")
    if top != package:
        return ""
    if not rest or f"{package}.{rest[0]}" not in modules(package):
        return "__init__"
    return rest[0]


def crossings(package: str, allowed: dict[str, str]) -> Iterator[str]:
    for name, path in modules(package).items():
        mine = part(package, name)
        for line, imported in imports(path):
            theirs = part(package, imported)
            if theirs and theirs not in (mine, *allowed[mine].split()):
                yield f"{path.relative_to(ROOT)}:{line}: {mine} imports {imported}"


@pytest.mark.parametrize(("package", "allowed"), [("conformance", CONFORMANCE), ("impl", IMPL)])
def test_imports_go_one_way(package: str, allowed: dict[str, str]) -> None:
    parts = {part(package, name) for name in modules(package)}
    assert parts <= set(allowed), f"parts without a rule: {sorted(parts - set(allowed))}"
    assert list(crossings(package, allowed)) == []


@pytest.mark.parametrize("allowed", [CONFORMANCE, IMPL], ids=["conformance", "impl"])
def test_the_rules_allow_no_circle(allowed: dict[str, str]) -> None:
    left = {name: set(others.split()) for name, others in allowed.items()}
    while left:
        free = [name for name, others in left.items() if not others & set(left)]
        assert free, f"these may import each other in a circle: {sorted(left)}"
        for name in free:
            del left[name]


def test_the_suite_does_not_know_the_implementation_nor_the_other_way_round() -> None:
    for package, other in (("conformance", ("impl", "tests")), ("impl", ("conformance", "tests"))):
        for path in modules(package).values():
            for line, imported in imports(path):
                top = imported.partition(".")[0]
                assert top not in other, f"{path.relative_to(ROOT)}:{line}: {imported}"


@pytest.mark.parametrize("package", ["conformance", "impl", "tests"])
def test_nobody_imports_torchs_private_test_modules(package: str) -> None:
    for path in modules(package).values():
        for line, imported in imports(path):
            assert not imported.startswith("torch.testing._"), f"{path}:{line}"


@pytest.mark.parametrize("package", ["conformance", "impl"])
def test_every_module_is_used(package: str) -> None:
    """A module is imported somewhere, or is found by its place: a case, a chapter of requirements,
    a command, a target's reference."""
    used = {
        name
        for top in ("conformance", "impl", "tests", "ci")
        for path in modules(top).values()
        for _, imported in imports(path)
        for name in (imported, imported.rpartition(".")[0])
        if path != modules(package).get(name)
    }
    text = "".join(
        path.read_text()
        for path in [
            *(ROOT / "conformance" / "targets").glob("*.toml"),
            *modules("conformance").values(),
        ]
    )
    for name, path in modules(package).items():
        is_found = (
            name in used
            or name in ENTRY_POINTS
            or path.name == "__init__.py"
            or path.name.startswith("test_")
            or name.startswith("conformance.requirements.")
            or f'"{name}"' in text
            or f'"{name}:' in text
        )
        assert is_found, f"nobody uses {path.relative_to(ROOT)}"
