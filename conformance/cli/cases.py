"""Which cases check which requirement: found by letting pytest collect them, without a run."""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from conformance.cli.certify import PACKAGE, suite_arguments


class CannotCollect(Exception):
    """The suite's own cases cannot be collected."""


@dataclass(frozen=True, slots=True)
class Case:
    """One test function of the suite.

    nodeid: without parameters.
    line: 1 for the first.
    covers: ids of requirements, over all parameters.
    says: first sentence of the docstring, or "".
    runs: how often it runs, with all parameters and the world sizes of the default.
    """

    nodeid: str
    path: Path
    line: int
    covers: frozenset[str]
    world_sizes: tuple[int, ...]
    says: str
    runs: int


class _Collector:
    def __init__(self) -> None:
        self.items: list[pytest.Item] = []
        self.problems: list[str] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.items = list(items)
        items.clear()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.problems.append(f"{report.nodeid}: {report.longreprtext.splitlines()[-1]}")


def collect_cases() -> list[Case]:
    """Every case of the suite, in the order of their files. Raises CannotCollect."""
    collector = _Collector()
    # The terminal of this inner run would mix with ours; its target and workers do not matter.
    quiet = ["-p", "no:terminal", "-p", "no:xdist", "-p", "no:cacheprovider", "--assert=plain"]
    arguments = [*suite_arguments(), *quiet, "--collect-only", "--target=torch"]
    # What a user adds to each run is not for this one, and may need plugins that it leaves out.
    added = os.environ.pop("PYTEST_ADDOPTS", None)
    try:
        code = pytest.main(arguments, plugins=[collector])
    finally:
        if added is not None:
            os.environ["PYTEST_ADDOPTS"] = added
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        collector.problems.append(f"pytest ended with exit code {int(code)}")
    if collector.problems:
        raise CannotCollect("; ".join(collector.problems))
    by_function: dict[str, list[pytest.Item]] = {}
    for item in collector.items:
        by_function.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return [_case(nodeid, items) for nodeid, items in by_function.items()]


def _case(nodeid: str, items: Sequence[pytest.Item]) -> Case:
    _, line, _ = items[0].reportinfo()
    named = (name for item in items for m in item.iter_markers("covers") for name in m.args)
    sizes = {_parameters(item).get("world_size") for item in items}
    doc = inspect.getdoc(getattr(items[0], "obj", None)) or ""
    return Case(
        nodeid=nodeid,
        path=items[0].path.relative_to(PACKAGE.parent),
        line=(line or 0) + 1,
        covers=frozenset(name if isinstance(name, str) else name.id for name in named),
        world_sizes=tuple(sorted(size for size in sizes if size is not None)),
        says=" ".join(doc.partition("\n\n")[0].split()),
        runs=len(items),
    )


def _parameters(item: pytest.Item) -> dict[str, Any]:
    callspec = getattr(item, "callspec", None)
    return callspec.params if callspec else {}
