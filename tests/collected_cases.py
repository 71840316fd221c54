"""The suite's cases as pytest finds them, to compare with what is read from their sources."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from conformance.catalogue.chapters import PACKAGE
from conformance.run.invocation import suite_arguments


@dataclass(frozen=True, slots=True)
class CollectedCase:
    """One test function of the suite, over all its parameters; see `catalogue.cases.Case`.

    world_sizes: of a run without options.
    """

    path: Path
    name: str
    line: int
    covers: frozenset[str]
    world_sizes: tuple[int, ...]
    says: str


class _Collector:
    def __init__(self) -> None:
        self.items: list[pytest.Item] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.items = list(items)
        items.clear()


def collect_cases() -> list[CollectedCase]:
    """Every case of the suite, in the order of their files."""
    collector = _Collector()
    # The terminal of this inner run would mix with ours; its target and workers do not matter.
    quiet = ["-p", "no:terminal", "-p", "no:xdist", "-p", "no:cacheprovider", "--assert=plain"]
    arguments = [*suite_arguments(), *quiet, "--collect-only", "--target=torch"]
    # What a user adds to each run is not for this one, and may need plugins that it leaves out.
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTEST_ADDOPTS", raising=False)
        code = pytest.main(arguments, plugins=[collector])
    assert code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    by_function: dict[str, list[pytest.Item]] = {}
    for item in collector.items:
        by_function.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return [_case(items) for items in by_function.values()]


def _case(items: Sequence[pytest.Item]) -> CollectedCase:
    _, line, _ = items[0].reportinfo()
    named = (name for item in items for m in item.iter_markers("covers") for name in m.args)
    sizes = {_parameters(item).get("world_size") for item in items}
    doc = inspect.getdoc(getattr(items[0], "obj", None)) or ""
    return CollectedCase(
        path=items[0].path.relative_to(PACKAGE.parent),
        name=items[0].name.partition("[")[0],
        line=(line or 0) + 1,
        covers=frozenset(name if isinstance(name, str) else name.id for name in named),
        world_sizes=tuple(sorted(size for size in sizes if size is not None)),
        says=" ".join(doc.partition("\n\n")[0].split()),
    )


def _parameters(item: pytest.Item) -> dict[str, Any]:
    callspec = getattr(item, "callspec", None)
    return callspec.params if callspec else {}
