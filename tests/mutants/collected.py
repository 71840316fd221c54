"""The suite's cases, collected once, to be run on one mutant after the other.

A run of pytest for each mutant would set up and collect for longer than its cases last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from pathlib import Path

import pytest
from _pytest.config import _prepareconfig
from _pytest.main import Session

from conformance import plugin
from conformance.catalogue.chapters import chapter_files
from conformance.catalogue.rules import catalogue, ids_in
from conformance.report.results import RequirementResult, judge
from conformance.rule import Catalogue
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
    """A session of pytest with the cases of some requirements. Call `close` at the end."""

    def __init__(self, requirements: Collection[str], folder: Path) -> None:
        """requirements: those of `run`; other chapters are left out.
        folder: where the cases' temporary folders are made; it is emptied.
        """
        self._reports: list[pytest.TestReport] = []
        options = ("--rootdir", str(ROOT), "-o", "addopts=", "--assert", "plain", *QUICK)
        places = ("--target", "torch", "--basetemp", str(folder))
        files = [file for file in chapter_files() if not ids_in(file).isdisjoint(requirements)]
        self._config = _prepareconfig([*map(str, files), *options, *places], [self, AnyMachine()])
        refusal = plugin.pytest_cmdline_main(self._config)
        assert refusal is None, f"exit code {refusal}"
        self._config._do_configure()
        try:
            self._covering = self._collect()
        except BaseException:
            self._config._ensure_unconfigure()
            raise

    def _collect(self) -> dict[str, list[pytest.Item]]:
        """Id of a requirement -> its cases."""
        for of_the_whole_run in ("conformance-certifier", "conformance-progress"):
            self._config.pluginmanager.unregister(name=of_the_whole_run)
        self._board = self._config.stash[BOARD]
        session = Session.from_config(self._config)
        self._config.hook.pytest_sessionstart(session=session)
        self._config.hook.pytest_collection(session=session)
        assert not session.testsfailed, "a chapter cannot be collected"
        covering: dict[str, list[pytest.Item]] = {}
        found = self._config.stash[FOUND]  # also what torch does not claim
        self._marks = {item: list(item.own_markers) for item in found}
        for item in self._marks:
            for id in make_plan(item, self._config.stash[SETTINGS]).covers:
                covering.setdefault(id, []).append(item)
        return covering

    def close(self) -> None:
        self._config.stash[BOARD] = self._board
        self._config._ensure_unconfigure()

    def run(self, settings: Settings, requirement: str) -> tuple[RequirementResult, list[str]]:
        """What the cases of a requirement come to, up to the first that fails, and their reports.

        No case has a longer deadline than the settings.
        """
        items = self._covering.get(requirement, [])
        assert items, f"no case covers {requirement}"
        stash = self._config.stash
        stash[SETTINGS], stash[CAUSES], stash[DIAGNOSES] = settings, Counter(), Diagnoses()
        stash[BOARD] = board = Board.make()
        try:
            for item in items:
                self._renew(item, settings)
            self._reports.clear()
            for item in select(items, {item.nodeid: item.stash[PLAN] for item in items}, settings):
                self._config.hook.pytest_runtest_protocol(item=item, nextitem=None)
                if any(report.failed for report in self._reports):
                    break
        finally:
            board.remove()
        cases = [case for case in map(result_of, self._reports) if case is not None]
        which = [catalogue()[id] for id in (requirement, *catalogue().roots(requirement))]
        found = judge(Catalogue(which), settings.target, cases, {}).requirements[0]
        return found, [report.longreprtext for report in self._reports if report.failed]

    def _renew(self, item: pytest.Item, settings: Settings) -> None:
        """Take away what an earlier run has left in the item."""
        item.own_markers[:] = self._marks[item]
        item.user_properties.clear()
        item._report_sections.clear()
        item.stash = pytest.Stash()
        mark = item.get_closest_marker("deadline")
        if mark and mark.args[0] > settings.deadline_s:
            item.add_marker(pytest.mark.deadline(settings.deadline_s), append=False)
        item.stash[PLAN] = make_plan(item, settings)

    # Hooks: this object is a plugin of the session.

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(report)
