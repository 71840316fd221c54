"""Runs the scripts of `ledger/` on the torch that is installed, and compares with what is recorded.

    ci/ledger                       # all; exit code 1 if a state is another one than recorded
    ci/ledger strided_all_reduce    # some
    ci/ledger --write               # record the states of this version of torch
    ci/ledger --page                # print the page, from what is recorded; runs nothing
    ci/ledger --issue strided_all_reduce  # print a report to file; runs nothing

torch is imported once: each script runs in a fork of this process, as `python SCRIPT` would run it.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import runpy
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ci.findings import (
    FOLDER,
    NOT_RUN,
    RIGHT,
    SIGNS,
    WRONG,
    Finding,
    findings,
    issue,
    issues,
    page,
    read_states,
    write_states,
)

LIMIT_S = 90.0  # a script ends by itself much earlier
SHARED = (
    "torch.distributed.fsdp.wrap",
    "torch.distributed.nn.functional",
    "torch.distributed._functional_collectives",
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
    "torch.nn.parallel",
    "torch.utils.checkpoint",
)


@dataclass(frozen=True)
class Ended:
    code: int
    last_line: str
    took_s: float


@dataclass(frozen=True)
class Running:
    finding: Finding
    output: Path
    since: float


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="ci/ledger",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", help="files of ledger/, without .py (default: all)")
    parser.add_argument("--write", action="store_true", help="record the states")
    parser.add_argument("--page", action="store_true", help="print the page and run nothing")
    parser.add_argument("--issue", action="store_true", help="print reports to file, run nothing")
    parser.add_argument("--issues", action="store_true", help="print ISSUES.md and run nothing")
    parser.add_argument("--workers", type=int, default=2, metavar="N")
    arguments = parser.parse_args()
    chosen = [f for f in findings() if not arguments.names or f.name in arguments.names]
    if arguments.page or arguments.issues:
        print((page if arguments.page else issues)(findings(), read_states()), end="")
        return 0
    if arguments.issue:
        print("\n".join(issue(finding, read_states()) for finding in chosen), end="")
        return 0
    version = ".".join(importlib.import_module("torch").__version__.split(".")[:2])
    before = read_states().get(version, {})
    seen: dict[str, str] = {}
    for finding, ended in run(chosen, arguments.workers):
        seen[finding.name] = state_of(finding, ended)
        same = seen[finding.name] == before.get(finding.name)
        tell = "" if same else f"   (recorded: {before.get(finding.name)})"
        print(f"{seen[finding.name]:12} {ended.took_s:3.0f} s  {finding.name}{tell}", flush=True)
        if not same or seen[finding.name] != RIGHT:
            print(f"    {ended.last_line[:200]}", flush=True)
    if arguments.write:
        clear = {name: state if state in SIGNS else NOT_RUN for name, state in seen.items()}
        write_states({**read_states(), version: {**before, **clear}})
    return int(any(before.get(name) != state for name, state in seen.items()))


def state_of(finding: Finding, ended: Ended) -> str:
    """A script that fails in another way than it should is neither wrong nor right; it is recorded
    as not run."""
    if ended.code == 0 and ended.last_line == RIGHT:
        return RIGHT
    if ended.code == 1 and re.match(f"wrong: .*({finding.shows})", ended.last_line):
        return WRONG
    if ended.last_line.startswith(NOT_RUN):  # there is no device, or nothing of the kind
        return NOT_RUN
    return "unclear"


def run(chosen: list[Finding], workers: int) -> Iterator[tuple[Finding, Ended]]:
    for name in SHARED:
        importlib.import_module(name)
    waiting, running = list(reversed(chosen)), dict[int, Running]()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        while waiting or running:
            while waiting and len(running) < workers:
                finding = waiting.pop()
                output = Path(folder) / f"{finding.name}.txt"
                running[start(finding, output)] = Running(finding, output, time.monotonic())
            for pid, each in list(running.items()):
                code = code_of(pid, time.monotonic() - each.since)
                if code is not None:
                    del running[pid]
                    lines = each.output.read_text(errors="replace").strip().splitlines()
                    took_s = time.monotonic() - each.since
                    yield each.finding, Ended(code, lines[-1] if lines else "", took_s)
            time.sleep(0.05)


def start(finding: Finding, output: Path) -> int:
    """Runs a script in a fork, and in a process group of its own; returns the process's id."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(file, 1)
        os.dup2(file, 2)
        runpy.run_path(str(FOLDER / f"{finding.name}.py"), run_name="__main__")
        code = 0
    except SystemExit as error:
        print(error.code, file=sys.stderr)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        code = 2
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def code_of(pid: int, age_s: float) -> int | None:
    """The exit code, once there is one; a script above the limit is ended with all its ranks."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    if not ended and age_s > LIMIT_S:
        os.killpg(pid, signal.SIGKILL)
        ended, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) if ended else None


if __name__ == "__main__":
    sys.exit(main())
