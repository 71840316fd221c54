"""Runs pytest with the plugin from a test, in its own process or in this one; reads the results.

[Note: marked processes]
A run in a new interpreter carries a marker in its environment, which all of its descendants
inherit, however they detach. So "no process is left behind" is a question to /proc.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from conformance.catalogue.rules import catalogue
from conformance.harness.rank import FURTHER
from conformance.report.folder import newest_in
from conformance.report.results import RequirementResult, Results
from conformance.session.certifier import Certifier
from tests.inner_runs import QUICK
from tests.warm_python import run_python

ROOT = Path(__file__).parents[2]
PLUGIN = ("-p", "conformance.plugin", "-p", "no:cacheprovider", "--color=no")

_MARKER = "TEST_RUN_MARKER"


@dataclass(frozen=True)
class Run:
    """A run that has ended. certificate: the document, or None if none was written."""

    exit_status: int
    out: str
    err: str
    certificate: dict[str, Any] | None

    def verdict(self, requirement: str) -> str:
        return str(self.row(requirement)["verdict"])

    def row(self, requirement: str) -> dict[str, Any]:
        assert self.certificate is not None, self.out + self.err
        [row] = [r for r in self.certificate["requirements"] if r["id"] == requirement]
        return row  # type: ignore[no-any-return]  # JSON

    def report(self, name: str) -> str:
        """What pytest printed about the failed case of this name."""
        heading = rf"^_+ (?:ERROR at \w+ of )?{re.escape(name)} _+\n(.*?)(?=^_{{3,}} |^={{3,}} |\Z)"
        return "\n".join(re.findall(heading, self.out, re.MULTILINE | re.DOTALL))


class Outside:
    """Runs pytest in processes of its own.

    `run` forks a process that has torch, see tests.warm_python. `run_in_new_interpreter` takes
    longer, and `left_over` finds what it leaves behind.
    """

    def __init__(self, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pytester = pytester
        self.marker = uuid.uuid4().hex
        self._is_marked = True
        monkeypatch.setenv(_MARKER, self.marker)
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        monkeypatch.setenv("PYTHONWARNINGS", "error")
        monkeypatch.setenv(FURTHER, "")  # no case here trains
        for name in list(os.environ):
            if name.startswith("PYTEST_"):  # of the run that this test belongs to
                monkeypatch.delenv(name)

    def command(self, *args: str) -> tuple[str, ...]:
        return (*PLUGIN, "--target=torch", "--certificate=certificate", *args)

    def run(self, *args: str) -> Run:
        self._is_marked = False  # /proc does not show the environment of a forked process
        folder = self.pytester.path
        basetemp = f"--basetemp={folder / 'temporary'}"  # else that of the outer run
        done = run_python("-m", "pytest", basetemp, *self.command(*args), cwd=folder)
        print(done.stdout)
        print(done.stderr, file=sys.stderr)
        return self.ended(done.returncode, done.stdout, done.stderr)

    def run_in_new_interpreter(self, *args: str, timeout_s: float = 240) -> Run:
        command = self.command(*args)
        result = self.pytester.runpytest_subprocess(*command, timeout=timeout_s)
        return self.ended(int(result.ret), result.stdout.str(), result.stderr.str())

    def ended(self, exit_status: int, out: str = "", err: str = "") -> Run:
        path = newest_in(self.pytester.path / "certificate") / "certificate.json"
        certificate = json.loads(path.read_text()) if path.exists() else None
        return Run(exit_status, out, err, certificate)

    def left_over(self, patience_s: float = 60) -> list[str]:
        """Command lines of processes of this run that are still there when patience ends.

        A worker whose pytest was killed ends by itself, but execnet gives it 15 s.
        """
        assert self._is_marked, "processes of `run` cannot be found"
        give_up_at = time.monotonic() + patience_s
        while True:
            found = list(self._marked())
            if not found or time.monotonic() > give_up_at:
                return found
            time.sleep(0.05)

    def _marked(self) -> Iterator[str]:
        wanted = f"{_MARKER}={self.marker}".encode()
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if int(process.name) == os.getpid():
                    continue
                if wanted in (process / "environ").read_bytes().split(b"\0"):
                    yield (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()


@dataclass
class Inside:
    """A run in this process: what its plugin made of the cases, and what pytest reported."""

    exit_status: int = -1
    results: Results | None = None
    reports: list[pytest.TestReport] = field(default_factory=list)

    def result(self, requirement: str) -> RequirementResult:
        assert self.results is not None, "no case ran"
        [found] = [r for r in self.results.requirements if r.requirement.id == requirement]
        return found

    def outcomes(self) -> dict[str, str]:
        """Name of a case -> the worst outcome of its phases."""
        rank = ["passed", "skipped", "failed"]
        worst: dict[str, str] = {}
        for report in self.reports:
            name = report.nodeid.rpartition("::")[2]
            worst[name] = max(worst.get(name, "passed"), report.outcome, key=rank.index)
        return worst

    # Hooks: this object is a plugin of the run.

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.reports.append(report)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        certifier = session.config.pluginmanager.get_plugin("conformance-certifier")
        assert isinstance(certifier, Certifier)
        self.results = certifier.results


def run_inside(folder: Path, *args: str, paths: Sequence[str] = ()) -> Inside:
    """Run the cases of a folder, or only those paths, in this process, with its warm ranks."""
    seen = Inside()
    options = ("--rootdir", str(folder), "-c", os.devnull, "--import-mode=importlib")
    target = () if any(arg.startswith("--target") for arg in args) else ("--target=torch",)
    command = [*(paths or [str(folder)]), *PLUGIN[:2], *options, *QUICK, *target, *args]
    try:
        seen.exit_status = int(pytest.main(command, plugins=[seen]))
    finally:
        _forget(folder)
    return seen


def _forget(folder: Path) -> None:
    """Undo what a run leaves in this process: its modules, and its cases' own requirements."""
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(f"{folder}/"):
            del sys.modules[name]
    catalogue.cache_clear()
