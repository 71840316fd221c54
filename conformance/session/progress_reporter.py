"""A pytest plugin that shows a run's progress on the terminal, and each failure as it comes."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable

import pytest

from conformance.report.progress import Progress
from conformance.run.worker_files import Board
from conformance.session.certifier import result_of

_LINE_EVERY_S = 30.0  # of a log
_REDRAWN_EVERY_S = 0.2  # of a terminal's last line


class ProgressReporter:
    """A plugin of the process that the user started, wherever the cases run.

    On a terminal it keeps one line up to date, in place of pytest's letters. It leaves pytest's
    output as it is, and adds a line now and then, where that goes to a file, with -v, or where
    another plugin draws.
    """

    def __init__(self, config: pytest.Config, board: Board) -> None:
        self._config = config
        self._board = board
        self._terminal: pytest.TerminalReporter | None = None
        self._progress: Progress | None = None
        self._is_live = False
        self._started_at = self._told_at = time.monotonic()

    # With pytest-xdist, the workers tell what they found; each finds the same.
    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Iterable[str]) -> None:
        self._begin(ids)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._begin(item.nodeid for item in session.items)

    def _begin(self, ids: Iterable[str]) -> None:
        running = frozenset(ids)
        cases = {id: rules for id, rules in self._board.planned().cases.items() if id in running}
        if self._progress is not None or not cases or self._config.option.collectonly:
            return
        self._terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if self._terminal is None or self._terminal.verbosity < -1:
            return
        self._progress = Progress(cases)
        self._is_live = _is_free(self._terminal)
        if self._is_live:
            # Percentages would follow our line. An option of pytest's turns them off, but no later
            # than at its start; without this attribute they would only be untidy.
            self._terminal._show_progress_info = False
            self._terminal.showfspath = False
        self._started_at = self._told_at = time.monotonic()

    @pytest.hookimpl(wrapper=True)
    def pytest_report_teststatus(
        self,
    ) -> Generator[None, tuple[str, str, object], tuple[str, str, object]]:
        category, letter, word = yield
        return category, "" if self._is_live else letter, word

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        result = result_of(report)
        if self._progress is None or self._terminal is None or result is None:
            return
        told = self._progress.failure(result)
        if told:
            self._write_line(told, red=True)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        if self._progress is None or self._terminal is None:
            return
        self._progress.case_done(nodeid)
        now = time.monotonic()
        if now - self._told_at < (_REDRAWN_EVERY_S if self._is_live else _LINE_EVERY_S):
            return
        self._told_at = now
        line = self._progress.line(now - self._started_at)
        if self._is_live:
            self._terminal.rewrite(line, erase=True)
            self._terminal.currentfspath = -2  # what others write begins a line of its own
        else:
            self._write_line(line)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        self._clear()
        self._is_live = False

    def _write_line(self, line: str, **markup: bool) -> None:
        assert self._terminal is not None
        self._clear()
        self._terminal.ensure_newline()
        # With -q, pytest does not note that letters stand on the line.
        if not self._is_live and self._config.get_terminal_writer().width_of_current_line:
            self._terminal.line("")
        self._terminal.write_line(line, **markup)
        self._told_at = 0 if self._is_live else self._told_at

    def _clear(self) -> None:
        """Take our line away, so that the next one stands in its place."""
        if self._is_live and self._terminal is not None:
            self._terminal.rewrite("", erase=True)
            self._terminal.rewrite("")
            self._terminal.currentfspath = None


def _is_free(terminal: pytest.TerminalReporter) -> bool:
    """Whether nothing but pytest itself writes to the terminal, and that letters only."""
    option = terminal.config.option
    # Left as plain objects: pytest's stub and its class do not agree on the type of `isatty`.
    conditions: tuple[object, ...] = (
        terminal.isatty,
        type(terminal) is pytest.TerminalReporter,
        terminal.verbosity <= 0,
        option.capture != "no",
        not option.usepdb,
    )
    return all(conditions)
