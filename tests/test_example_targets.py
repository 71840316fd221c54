"""The example target files load, whether or not what they describe is installed."""

from __future__ import annotations

import ast
import fnmatch
from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance.catalogue.rules import catalogue
from conformance.target import load_target

TARGETS = Path(__file__).parents[1] / "examples" / "targets"
FILES = sorted(TARGETS.glob("*.toml"))


def references(path: Path) -> Iterator[tuple[str, str]]:
    """What the file names as (module, attribute), the attribute "" if it names a module alone."""
    target = load_target(str(path))
    named = [module + ":" for module in target.imports]
    named += [target.ddp, target.fsdp, target.sync_batchnorm, target.options, target.activate]
    for name in filter(None, named):
        module, _, attribute = name.partition(":")
        if module.split(".")[0] != "torch":
            yield module, attribute


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_target_file_loads_and_deviates_from_rules_that_exist(path: Path) -> None:
    deviations = load_target(str(path)).deviations
    patterns = [pattern for deviation in deviations for pattern in deviation.requirements]
    assert [p for p in patterns if not fnmatch.filter(catalogue(), p)] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_a_target_file_names_is_in_the_folder_or_in_torch(path: Path) -> None:
    for module, attribute in references(path):
        tree = ast.parse((TARGETS / f"{module}.py").read_text())
        kinds = (ast.FunctionDef, ast.ClassDef)
        defined = {node.name for node in tree.body if isinstance(node, kinds)}
        assert not attribute or attribute in defined


def test_the_readme_names_every_target_file() -> None:
    text = (TARGETS / "README.md").read_text()
    assert FILES
    assert [path.name for path in FILES if f"`{path.name}`" not in text] == []
