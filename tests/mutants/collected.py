"""The suite's cases, collected once, to be run on one mutant after the other.

A run of pytest for each mutant would set up and collect for longer than its cases last.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from _pytest.config import _prepareconfig
from _pytest.main import Session

from conformance import plugin
from conformance.catalogue.chapters import SPEC
from conformance.catalogue.rules import catalogue
from conformance.report.results import RequirementResult, judge
from conformance.run.plan import make_plan, select
from conformance.run.settings import Settings
from conformance.run.worker_files import Board
from conformance.session.certifier import result_of
from conformance.session.diagnosis import Diagnoses
from conformance.session.items import BOARD, CAUSES, DIAGNOSES, FOUND, PLAN, SETTINGS
from tests.inner_runs import QUICK
from tests.mutants.any_machine import AnyMachine

ROOT = Path(__file__).parents[2]


class CollectedCases:
    """Whoever makes it calls `close`."""

    def __init__(self, folder: Path) -> None:
        """folder: where the cases' temporary folders are made; it must not exist."""
        self._reports: list[pytest.TestReport] = []
        options = ("--rootdir", str(ROOT), "-o", "addopts=", "--assert", "plain", *QUICK)
        places = ("--target", "torch", "--basetemp", str(folder))
        self._config = _prepareconfig([str(SPEC), *options, *places], [self, AnyMachine()])
        plugin.pytest_cmdline_main(self._config)
        self._config._do_configure()
        self._session = Session.from_config(self._config)
        self._config.hook.pytest_sessionstart(session=self._session)
        self._config.hook.pytest_collection(session=self._session)
        self._board = self._config.stash[BOARD]
        self._covering: dict[str, list[pytest.Item]] = {}
        self._marks: dict[pytest.Item, list[pytest.Mark]] = {}
        found = self._config.stash[FOUND]
        for item in dict.fromkeys(found):
            self._marks[item] = list(item.own_markers)
            for id in make_plan(item, self._config.stash[SETTINGS]).covers:
                self._covering.setdefault(id, []).append(item)

    def close(self) -> None:
        self._config.stash[BOARD] = self._board
        self._config._ensure_unconfigure()

    def run(self, settings: Settings, requirement: str) -> tuple[RequirementResult, list[str]]:
        """What the cases of a requirement come to, up to the first that fails, and their reports.

        No case has a longer deadline than the settings.
        """
        stash = self._config.stash
        stash[SETTINGS], stash[CAUSES], stash[DIAGNOSES] = settings, Counter(), Diagnoses()
        stash[BOARD] = board = Board.make()
        items = self._covering[requirement]
        for item in items:
            item.stash = pytest.Stash()
            item.stash[PLAN] = make_plan(item, settings)
            item.own_markers[:] = self._marks[item]
            mark = item.get_closest_marker("deadline")
            if mark and mark.args[0] > settings.deadline_s:
                item.add_marker(pytest.mark.deadline(settings.deadline_s), append=False)
        self._reports.clear()
        try:
            for item in select(items, {item.nodeid: item.stash[PLAN] for item in items}, settings):
                self._config.hook.pytest_runtest_protocol(item=item, nextitem=None)
                if any(report.failed for report in self._reports):
                    break
        finally:
            board.remove()
        cases = [case for case in map(result_of, self._reports) if case is not None]
        results = judge(catalogue(), settings.target, cases, {})
        [found] = [r for r in results.requirements if r.requirement.id == requirement]
        return found, [report.longreprtext for report in self._reports if report.failed]

    # Hooks: this object is a plugin of the session.

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(report)
