"""Mutants of a source: what is changed, what is left alone, and that ranks load the change."""

from __future__ import annotations

import ast
import importlib
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance.__main__ import main
from conformance.power import source_loading
from conformance.power.reach import REACHED, Case, Marks, Reach
from conformance.power.source_loading import MUTATION, NOTING, first_lines, modules_of
from conformance.power.source_mutants import mutants_of
from conformance.power.source_mutations import KINDS, mutated, mutations

# Kind of mutation -> a statement that can have one, and what becomes of it.
CHANGES = {
    "relation": ("x = a < b", "x = a <= b"),
    "arithmetic": ("x = a + b", "x = a - b"),
    "logic": ("x = a and b", "x = a or b"),
    "condition": ("x = 'y' if a else 'n'", "x = 'y' if not a else 'n'"),
    "number": ("x = a[0]", "x = a[1]"),
    "flag": ("f(a, now=True)", "f(a, now=False)"),
    "sign": ("x = -a", "x = a"),
    "statement": ("a.x = b", "pass"),
    "arguments": ("x = f(a, b)", "x = f(b, a)"),
    "text": ("x = f'rank {a} of 2'", "x = f'rank  of 2'"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_makes_its_change(kind: str) -> None:
    source, changed = CHANGES[kind]
    [found] = [m for m in mutations(source) if m.kind == kind]
    assert ast.unparse(mutated(source, found.name)) == changed
    assert found.line == 1


@pytest.mark.parametrize(
    "source",
    [
        '"""What it does: 1 < 2."""',
        "from a import b",
        "assert a < 1",
        "if TYPE_CHECKING:\n    import a",
        "__all__ = [a + b]",
        "def f(a: list[1]) -> b[2]: ...",
        "x: int | None",
        "x = 'a' + b",
        "x = isinstance(a, b)",
        "for a in zip(*b, strict=True): ...",
    ],
)
def test_what_only_describes_is_left_alone(source: str) -> None:
    assert mutations(source) == []


def test_each_name_stands_for_one_mutation() -> None:
    source = textwrap.dedent(
        """
        LIMIT = 3

        def f(a, b):
            if a < b and not b:
                a.x += 1
                return -1
            return max(a[0], b) + 1
        """
    )
    found = mutations(source)
    changed = {ast.unparse(mutated(source, m.name)) for m in found}
    assert len(changed) == len(found) == len({m.name for m in found})
    assert ast.unparse(ast.parse(source)) not in changed
    assert {m.statement_line for m in found if m.line == 2} == {0}
    assert {m.statement_line for m in found if m.line == 5} == {5}
    with pytest.raises(KeyError):
        mutated(source, "line_1_1_number")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package that only this test has."""
    (tmp_path / "planets" / "inner").mkdir(parents=True)
    (tmp_path / "planets" / "__init__.py").write_text("")
    (tmp_path / "planets" / "inner" / "__init__.py").write_text("COUNT = 2\n")
    (tmp_path / "planets" / "inner" / "orbit.py").write_text(
        textwrap.dedent(
            '''
            from functools import lru_cache

            @lru_cache(maxsize=4)
            def days(distance):
                """A docstring."""
                if distance > 1:
                    return 365
                try:
                    return 88
                finally:
                    distance = 0
            '''
        )
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    finders = list(sys.meta_path)
    yield "planets.inner"
    sys.meta_path[:] = finders
    for name in [name for name in sys.modules if name.partition(".")[0] == "planets"]:
        del sys.modules[name]


def test_modules_are_found_with_their_lines(package: str) -> None:
    assert list(modules_of(package)) == [package, f"{package}.orbit"]
    begins, count = first_lines(package)
    assert begins == {package: 0, f"{package}.orbit": 2}
    assert count == 2 + 13
    with pytest.raises(ModuleNotFoundError):
        modules_of("no_such_package_here")


def test_a_module_is_loaded_with_its_mutation(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    [relation] = [m for m in mutants_of(package) if m.mutation.kind == "relation"]
    monkeypatch.setenv(MUTATION, f"{relation.module}:{relation.mutation.name}")
    source_loading._install()
    orbit = importlib.import_module(f"{package}.orbit")
    assert orbit.days(1) == 365
    assert not list(Path(orbit.__file__ or "").parent.rglob("orbit*.pyc"))
    with pytest.raises(RuntimeError, match="was imported before it could be changed"):
        source_loading._install()


def test_lines_that_are_run_are_marked(
    package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begins, count = first_lines(package)
    marks = Marks.made(str(tmp_path / "marks"), count)
    monkeypatch.setenv(NOTING, package)
    monkeypatch.setenv(REACHED, str(tmp_path / "marks"))
    source_loading._install()
    orbit = importlib.import_module(f"{package}.orbit")
    assert marks.take() == []
    begin = begins[f"{package}.orbit"]
    for distance, lines in ((2, [7, 8]), (1, [7, 9, 10, 12]), (1, [7, 9, 10, 12])):
        orbit.days(distance)
        assert marks.take() == [begin + line for line in lines]
    assert orbit.days.__doc__ == "A docstring."


def test_reach_is_written_and_read(tmp_path: Path) -> None:
    cases = {"a": Case(2.0, frozenset([1, 3])), "b": Case(1.0, frozenset([3]))}
    reach = Reach("this", cases)
    reach.write(tmp_path / "reach")
    assert Reach.read(tmp_path / "reach") == reach
    assert reach.reaching(frozenset([3, 4])) == ["b", "a"]
    assert reach.reaching(frozenset([2])) == []
    assert reach.reaching(None) == ["b", "a"]
    (tmp_path / "reach").write_text("{}")
    with pytest.raises(ValueError, match="does not say what cases reach"):
        Reach.read(tmp_path / "reach")


def test_a_mutant_of_a_source_is_killed(capsys: pytest.CaptureFixture[str]) -> None:
    package = ["--source", "impl.sync_batchnorm", "--profile", "sync_batchnorm"]
    rules = ["--requirement", "sync_batchnorm/output", "--workers", "1"]
    assert main(["power", *package, *rules, "*moments__line_*_statement", "--sample", "1"]) == 0
    killed = capsys.readouterr().out.splitlines()[0]
    assert killed.startswith("killed    impl.sync_batchnorm.moments:")
    assert "by sync_batchnorm/output, broken" in killed
