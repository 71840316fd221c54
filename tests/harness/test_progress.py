"""A run tells how far it is and what fails, on a terminal and in a log."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

from tests.harness.kit import Outside

pytest_plugins = ["pytester"]

CASES = """
from conformance import covers
from conformance.rule import MUST, Requirement


def r(name):
    return Requirement(id=f"mine/{name}", level=MUST, profile="faults", says="Yes.", source="me")


@covers(r("one"))
def test_holds():
    pass

@covers(r("two"))
def test_fails():
    assert False, "two is not three"

@covers(r("three"))
def test_holds_too():
    pass
"""
AT_ONCE = (
    "import conformance.session.progress_reporter as p\np._LINE_EVERY_S = p._REDRAWN_EVERY_S = 0\n"
)
FAILURE = "broken: mine/two: two is not three"


@pytest.fixture
def prepared(outside: Outside) -> Outside:
    outside.pytester.makepyfile(test_case=CASES)
    outside.pytester.makeconftest(AT_ONCE)
    return outside


@pytest.mark.parametrize("args", [("-q",), ("-v", "-n1")], ids=" ".join)
def test_a_log_has_a_line_now_and_then_and_each_failure_as_it_comes(
    prepared: Outside, args: tuple[str, ...]
) -> None:
    run = prepared.run(*args)
    lines = run.out.splitlines()
    end = next(n for n, line in enumerate(lines) if "FAILURES" in line)
    told = [line for line in lines[:end] if line.startswith(("broken: ", "1 of", "2 of", "3 of"))]
    assert told == [
        "1 of 3 rules done, 0 failed",
        FAILURE,
        "2 of 3 rules done, 1 failed",
        "3 of 3 rules done, 1 failed",
    ]
    assert "1 failed, 2 passed" in run.out
    assert "\r" not in run.out


def test_nothing_is_told_where_nothing_is_to_be_told(prepared: Outside) -> None:
    assert "rules done" not in prepared.run("-qq").out


def test_a_terminal_has_one_line_that_is_kept_up_to_date(prepared: Outside) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "pytest", *prepared.command("--tb=no")]
    process = subprocess.Popen(
        command, cwd=prepared.pytester.path, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    seen = b""
    while True:
        try:
            seen += os.read(ours, 1 << 16)
        except OSError:  # the other end is closed
            break
    os.close(ours)
    assert process.wait(60) == 1
    text = seen.decode().replace("\r\n", "\n")
    drawn = [line.rstrip() for line in text.split("\r") if "rules done" in line]
    assert drawn == [
        "1 of 3 rules done, 0 failed",
        "2 of 3 rules done, 1 failed",
        "3 of 3 rules done, 1 failed",
    ]
    assert f"\r{FAILURE}\n" in text
    assert "test_case.py" not in text.partition("= conformance =")[0].partition("collected")[2]
