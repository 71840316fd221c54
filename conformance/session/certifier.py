"""A pytest plugin that gathers all cases' results, and writes the certificate and the summary."""

from __future__ import annotations

import shutil
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from conformance.catalogue.rules import catalogue
from conformance.exit_codes import EXIT_HARNESS_FAULT, EXIT_INTERRUPTED, EXIT_USAGE
from conformance.harness.pool import SHARED_POOL
from conformance.report.certificate import (
    CERTIFICATE,
    JUNIT,
    NAMED_IN_JUNIT,
    REPORT,
    Run,
    certificate_of,
    write_certificate,
)
from conformance.report.conclusion import Conclusion
from conformance.report.folder import CertificateFolder, aside
from conformance.report.results import CaseResult, Results, judge
from conformance.report.terminal import summary_lines, verdict_line
from conformance.rule import Requirement
from conformance.run.first_look import FirstLook, look_at, versions_of
from conformance.run.plan import why_not_exercised
from conformance.run.settings import Settings
from conformance.run.worker_files import Board, Planned

_WIDTH_MAX = 100  # of the summary: longer lines are hard to read

# Attributes of a report that hold a CaseResult and the case's own requirements as plain data: it
# may cross to the controller, which has not seen the cases.
_RESULT = "conformance"
_OWN = "conformance_own"


def attach(report: pytest.TestReport, result: CaseResult, own: tuple[Requirement, ...]) -> None:
    """Send with pytest's report what the case says, and the requirements that came with it."""
    report.__dict__[_RESULT] = result.to_plain()
    report.__dict__[_OWN] = [requirement.to_plain() for requirement in own]


def result_of(report: pytest.TestReport) -> CaseResult | None:
    """What `attach` was told; None for a report of something else."""
    plain = getattr(report, _RESULT, None)
    return None if plain is None else CaseResult.from_plain(plain)


def usage_error(message: str) -> int:
    """Tell the user in one line; the exit code."""
    print(f"ERROR: {message}", file=sys.stderr)
    return EXIT_USAGE


class Certifier:
    """A plugin of the process that the user started, wherever the cases ran."""

    def __init__(self, config: pytest.Config, settings: Settings, board: Board) -> None:
        self._config = config
        self._settings = settings
        self._board = board
        self._look = FirstLook("")
        self._cases: list[CaseResult] = []
        self._harness_faults: list[str] = []
        self._other_failures: list[str] = []
        self._something_failed = False
        self._gave_up = False
        self.is_written = False
        self.place: Path | None = None  # where the certificate is, once it is settled
        self._why_unwritten = ""
        self.results: Results | None = None
        self._started_at = datetime.now(timezone.utc)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> object:
        """Look at the target while the workers start; one that is not there is a usage error."""
        if session.config.option.collectonly:
            return None
        self._look = self._first_look()
        self._settings = self._settings.without(self._look.lacks)
        if self._look.error:
            message = f"--target {self._settings.spec}: {self._look.error}"
            self._board.note_usage_error(message)
            return True  # the loop is done
        return None

    def _first_look(self) -> FirstLook:
        target, crew = self._settings.target, SHARED_POOL.crew
        if crew is None or not crew.starts_together:
            return look_at(target)
        # All ranks at once: what the target starts in a single process would wait for the others.
        error = SHARED_POOL.acquire(self._config).prepare(target, tuple(sys.path))
        return FirstLook(error, versions_of(target))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._something_failed |= report.failed
        result = result_of(report)
        if result is not None:
            self._cases.append(result)
            for own in getattr(report, _OWN):
                catalogue().add(Requirement.from_plain(own))
        elif report.when in ("setup", "call", "teardown"):
            if report.failed:
                self._other_failures.append(report.nodeid)
        else:
            self._harness_faults.append(f"a pytest worker crashed in {report.nodeid}")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._harness_faults.append(f"{report.nodeid} cannot be collected")

    def pytest_internalerror(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        self._harness_faults.append(
            f"an internal error of pytest: {excinfo.exconly(tryshort=True)}"
        )

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        # pytest-xdist keeps to -x by an exception of its own, which pytest takes for Ctrl-C.
        is_plugins_own = excinfo.type.__module__ == "xdist.dsession"
        by_hand = "keyboard-interrupt" in str(excinfo.value)  # it was a worker that got the signal
        stops_at_failures = bool(self._config.option.maxfail)
        self._gave_up = (
            is_plugins_own and stops_at_failures and not by_hand and self._something_failed
        )

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.config.option.collectonly:
            return
        if self._gave_up and session.exitstatus == pytest.ExitCode.INTERRUPTED:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        nothing_selected = session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED
        nothing_wanted = nothing_selected or self._board.usage_error()
        planned = Planned() if nothing_wanted else self._board.planned()
        if self._cases or self._harness_faults or planned.cases:
            self.results = judge(
                catalogue(),
                self._settings.target,
                self._cases,
                why_not_exercised(self._settings, planned.unclaimed),
                dict.fromkeys(self._harness_faults),  # each worker collects by itself
                dict.fromkeys(self._other_failures),
                interrupted=session.exitstatus == pytest.ExitCode.INTERRUPTED,
                planned=planned.cases,
                files_left_out=planned.files_left_out,
                restricted=self._settings.restricts_world_sizes,
                is_selective=self._settings.is_selective,
            )
        session.exitstatus = self._exit_status(session.exitstatus)
        # A usage error leaves nothing behind that could be taken for a result.
        if self.results is not None and session.exitstatus != EXIT_USAGE:
            self._write_certificate(session, self.results)

    def _write_certificate(self, session: pytest.Session, results: Results) -> None:
        folder = self._settings.certificate
        if folder is None:
            return
        run = Run(
            started_at=self._started_at,
            ended_at=datetime.now(timezone.utc),
            arguments=self._config.invocation_params.args,
            workers=len(getattr(self._config.option, "tx", None) or ()),
            versions=self._look.versions,
            devices=self._look.devices,
            exit_status=int(session.exitstatus),
        )
        try:
            document = certificate_of(results, self._settings, run)
            write_certificate(aside(folder), document)
            self.is_written = True
            for xml in _records_of_junit(self._config):
                xml.add_global_property(NAMED_IN_JUNIT, document["digest"])
        except OSError as error:
            self._why_unwritten = f"--certificate {folder}: cannot write there: {error.strerror}"
            print(f"ERROR: {self._why_unwritten}", file=sys.stderr)
            session.exitstatus = EXIT_HARNESS_FAULT

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.results is None:
            return
        seconds = (datetime.now(timezone.utc) - self._started_at).total_seconds()
        width = min(shutil.get_terminal_size().columns, _WIDTH_MAX)
        terminalreporter.section("conformance")
        for line in summary_lines(self.results, seconds, width):
            terminalreporter.line(line)
        good = self.results.conclusion is Conclusion.CONFORMANT
        terminalreporter.line(verdict_line(self.results), green=good, red=not good, bold=True)
        if self.place is not None:
            terminalreporter.line(f"certificate: {self.place / CERTIFICATE}")
            terminalreporter.line(f"for reading: {self.place / REPORT}")
        if self._why_unwritten:
            terminalreporter.line(f"no certificate; {self._why_unwritten}", red=True, bold=True)

    def _exit_status(self, pytests_own: int) -> int:
        refused = self._board.usage_error()
        if refused:
            return usage_error(refused)
        if pytests_own == pytest.ExitCode.NO_TESTS_COLLECTED:
            return usage_error("no case was selected")
        if self._harness_faults or pytests_own == pytest.ExitCode.INTERNAL_ERROR:
            return EXIT_HARNESS_FAULT
        if pytests_own == pytest.ExitCode.INTERRUPTED:
            return EXIT_INTERRUPTED
        if pytests_own == pytest.ExitCode.USAGE_ERROR:
            return EXIT_USAGE
        if self.results is None:
            return pytests_own
        match self.results.conclusion:
            case Conclusion.UNKNOWN:
                return EXIT_HARNESS_FAULT
            case Conclusion.CONFORMANT | Conclusion.NO_CONCLUSION:
                return pytests_own
            case Conclusion.NOTHING_EXERCISED:
                if pytests_own == pytest.ExitCode.OK:
                    return usage_error(f"no requirement was exercised: {self.results.why_nothing}")
                return pytests_own
            case _:
                return 1


def _records_of_junit(config: pytest.Config) -> list[Any]:
    """pytest's plugins that write JUnit's record."""
    loaded: list[tuple[str, Any]] = config.pluginmanager.list_name_plugin()
    return [plugin for _, plugin in loaded if type(plugin).__name__ == "LogXML"]


class Settler:
    """Moves what a run has written in place, once JUnit's record of it is written too."""

    def __init__(
        self, config: pytest.Config, certifier: Certifier, folder: CertificateFolder
    ) -> None:
        self._config = config
        self._certifier = certifier
        self._folder = folder
        self._silenced: object = None

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        certifier = self._certifier
        if certifier.is_written and certifier.results is not None:
            unfinished = {Conclusion.INTERRUPTED, Conclusion.UNKNOWN}
            certifier.place = self._folder.settle(
                whole=certifier.results.is_whole,
                interrupted=certifier.results.conclusion in unfinished,
            )
        self._say_where_junit_is(certifier.place)

    def _say_where_junit_is(self, place: Path | None) -> None:
        """pytest announces its record where it was written; a refused run has none."""
        plugins = self._config.pluginmanager
        for xml in _records_of_junit(self._config):
            if not self._folder.is_aside(xml.logfile):
                continue
            if place is not None:
                xml.logfile = str(place / JUNIT)
            else:
                plugins.unregister(xml)
                self._silenced = xml

    @pytest.hookimpl(tryfirst=True)
    def pytest_unconfigure(self) -> None:
        if self._silenced is not None:  # pytest takes it away itself
            self._config.pluginmanager.register(self._silenced)
