"""Pytest's collection hooks: files to read, world sizes, cases to run, and what was planned."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest

from conformance.catalogue.chapters import is_chapter
from conformance.early_torch import collector_off
from conformance.harness.pool import SHARED_POOL
from conformance.run.budget import most_rules_first
from conformance.run.first_look import lacking
from conformance.run.plan import Plan, adopt_own, make_plan, select
from conformance.run.selection import (
    files_left_out,
    is_asked_for,
    planned_cases,
    without_a_claim,
)
from conformance.run.settings import UsageError
from conformance.run.worker_files import Planned
from conformance.session.items import BOARD, FOUND, PLAN, SETTINGS, is_drawn


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    with collector_off():  # most of what cases need is imported now
        return (yield)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import files of the suite that hold no case of the selection, unless they are named:
    pytest takes a named file without a collector for a mistake."""
    if SETTINGS not in config.stash or is_asked_for(collection_path, config.stash[SETTINGS]):
        return None
    return None if collection_path in named_paths(config) else True


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """A chapter is a module of cases, whatever its name. Pytest itself collects named files."""
    if not is_chapter(file_path) or parent.session.isinitpath(file_path):
        return None
    made: pytest.Collector | None = parent.ihook.pytest_pycollect_makemodule(
        module_path=file_path, parent=parent
    )
    return made


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "world_size" not in metafunc.fixturenames:
        return
    mark = metafunc.definition.get_closest_marker("world_sizes")
    listed = tuple(mark.args) if mark else ()
    at_least = mark.kwargs.get("at_least") if mark else 1
    sizes = metafunc.config.stash[SETTINGS].sizes_for(listed, at_least)
    metafunc.parametrize("world_size", sizes, ids=[f"ws{n}" for n in sizes], scope="function")


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Note every case of a file before a node id, --lf, -k and the like leave any of them out."""
    report = yield
    items = [child for child in report.result if isinstance(child, pytest.Item)]
    collector.config.stash[FOUND] += items
    try:
        for item in items:
            adopt_own(item)  # a case may rest on a rule of which no case was selected
    except UsageError as error:
        collector.config.stash[BOARD].note_usage_error(str(error))
    return report


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    board = config.stash[BOARD]
    plans: dict[str, Plan] = {}
    crew = SHARED_POOL.crew
    may_probe = crew is None or not crew.starts_together
    settings = config.stash[SETTINGS]
    if may_probe and not config.option.collectonly:
        settings = config.stash[SETTINGS] = settings.without(lacking(settings.target))
    try:
        for item in [*config.stash[FOUND], *items]:
            if item.nodeid not in plans:
                plans[item.nodeid] = make_plan(item, settings, may_probe=may_probe)
            item.stash[PLAN] = plans[item.nodeid]
    except UsageError as error:
        board.note_usage_error(str(error))
    if board.usage_error():
        # Not by `pytest.exit`: in a worker that looks like a crash, and others replace it.
        items.clear()
        return
    chosen = select(items, plans, settings)
    dropped = set(items) - set(chosen)
    if dropped:
        config.hook.pytest_deselected(items=list(dropped))
    if settings.fuzz_s is not None:
        chosen = [item for item in chosen if is_drawn(item)]
    rounds = settings.cases_per_rule
    in_order = settings.budget_s is None and rounds is None
    items[:] = chosen if in_order else most_rules_first(chosen, plans, rounds)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist says that this worker has collected
def pytest_collection_finish(session: pytest.Session) -> None:
    config = session.config
    board = config.stash[BOARD]
    if config.option.collectonly or board.usage_error():
        return
    found = config.stash[FOUND]
    if any(PLAN not in item.stash for item in found):
        return  # pytest refuses a node id, and goes no further
    plans = {item.nodeid: item.stash[PLAN] for item in [*found, *session.items]}
    settings = config.stash[SETTINGS]
    cases = planned_cases(found, session.items, plans, settings)
    unclaimed = without_a_claim(found, plans)
    board.note_planned(Planned(cases, files_left_out(found, settings), unclaimed))


def named_paths(config: pytest.Config) -> list[Path]:
    """The files and folders that pytest was told to collect."""
    folder = config.invocation_params.dir
    return [folder / arg.partition("::")[0] for arg in config.args]
