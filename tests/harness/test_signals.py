"""Ctrl-C, SIGTERM, a parent that is killed: how the run ends, and that nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.kit import Outside, Run

pytest_plugins = ["pytester"]

# What outlives any run: pytest's own folder, and the cache that torch makes for all processes of a
# user when it imports its compiler, as every process with an optimizer does.
OUTLIVING = ("pytest-of-", "torchinductor_")
PATIENCE_S = 300  # three processes that import torch, beside others that do the same

HANGING = """
import os
import time
from pathlib import Path

import pytest

from conformance import covers, world_sizes
from conformance.rule import MUST, Requirement

RETURNS = Requirement(
    id="mine/returns", level=MUST, profile="faults", says="It returns.", source="a test"
)


def sleeps(me, folder):
    if os.fork() == 0:  # what a case has started goes too
        time.sleep(1000)
        os._exit(0)
    Path(folder, f"there{me.rank}").touch()
    while True:
        time.sleep(1000)


@covers(RETURNS)
def test_returns():
    pass


@covers(RETURNS)
@world_sizes(2)
def test_hangs(ranks):
    ranks.run(sleeps, str(Path.cwd()))
"""


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the run puts what it needs for a while; a short path, for the sake of sockets."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def interrupt(outside: Outside, how: int, *args: str) -> Run:
    """Start a run, wait until its ranks hang, and send it a signal as a terminal does.

    It ignores SIGINT, as what a script starts with `&`, unless that is the signal.
    """
    folder = outside.pytester.path
    outside.pytester.makepyfile(test_hanging=HANGING)
    with (folder / "out").open("w") as out:
        ignoring = "" if how == signal.SIGINT else "trap '' INT; "
        command = (sys.executable, "-m", "pytest", *outside.command(*args))
        process = outside.pytester.popen(
            ["sh", "-c", f'{ignoring}exec "$@"', "sh", *command],
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        give_up_at = time.monotonic() + PATIENCE_S
        while not all((folder / f"there{rank}").exists() for rank in range(2)):
            assert process.poll() is None, (folder / "out").read_text()
            assert time.monotonic() < give_up_at, (folder / "out").read_text()
            time.sleep(0.05)
        if how == signal.SIGINT:
            os.killpg(process.pid, how)  # a terminal tells the whole group
        else:
            process.send_signal(how)
        process.wait(PATIENCE_S)
    finally:
        process.kill()
        process.wait()
    return outside.ended(process.returncode, (folder / "out").read_text())


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("args", [("-n0",), ("-n1",)], ids=["one process", "a worker"])
def test_a_signal_ends_a_run_and_its_ranks(
    outside: Outside, temporary: Path, args: tuple[str, ...], how: signal.Signals
) -> None:
    run = interrupt(outside, how, *args)
    assert run.exit_status == 130, run.out
    assert "KeyboardInterrupt" in run.out
    assert "conformant" not in run.out
    assert outside.left_over() == []
    assert [p.name for p in temporary.iterdir() if not p.name.startswith(OUTLIVING)] == []
    assert run.certificate is not None
    assert run.certificate["conclusion"] == "interrupted"
    assert run.verdict("mine/returns") == "holds", "the first case had ended"


@pytest.mark.parametrize("args", [("-n0",), ("-n1",)], ids=["one process", "a worker"])
def test_no_rank_outlives_a_parent_that_is_killed(
    outside: Outside, temporary: Path, args: tuple[str, ...]
) -> None:
    run = interrupt(outside, signal.SIGKILL, *args)
    assert run.exit_status == -signal.SIGKILL
    assert run.certificate is None
    assert outside.left_over() == []


@pytest.mark.parametrize(
    ("number", "judged"), [(signal.SIGTERM, 0), (signal.SIGKILL, 1)], ids=["ended", "killed"]
)
def test_no_worker_outlives_a_measurement_of_power(
    outside: Outside, number: signal.Signals, judged: int
) -> None:
    """judged: how many mutants are, before the signal comes."""
    command = [sys.executable, "-m", "conformance", "power", "--workers", "2"]
    command += ["--requirement", "all_reduce/sum"]  # of thousands of mutants
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as run:
        children = Path(f"/proc/{run.pid}/task/{run.pid}/children")
        while len(children.read_text().split()) < 3:  # two, and what tracks their resources
            time.sleep(0.05)
        assert run.stdout is not None
        for _ in range(judged):
            assert run.stdout.readline()
        run.send_signal(number)
        assert run.wait() == -number
    assert outside.left_over() == []
