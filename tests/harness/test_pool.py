"""The pool of ranks: deadlines, how ranks end, and what they print."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

from conformance.harness.me import Me
from conformance.harness.messages import pack
from conformance.harness.outcome import Returned, StillRunning
from conformance.harness.pool import Leak, Pool, WorldSpec
from conformance.harness.rank import HarnessFault, RankProcess
from conformance.harness.ranks import Ranks
from conformance.run.judgement import verdict_of
from conformance.target import load_target
from conformance.verdict import Verdict, worst

DEADLINE_S = 3.0
SLOW = "import time\ntime.sleep(5)\n"


def joined(tmp_path: Path, module: str, *, activate: str = "") -> list[object]:
    """What two ranks do when they join on a target with this module."""
    (tmp_path / "slow_target.py").write_text(module)
    target = replace(load_target("torch"), imports=("slow_target",), activate=activate)
    pool = Pool()
    try:
        spec = WorldSpec(target, 2, "cpu", 0, True, 60.0, (*sys.path, str(tmp_path)))
        return list(pool.join(spec, DEADLINE_S))
    finally:
        pool.close()


def test_importing_a_target_takes_no_time_from_a_case(tmp_path: Path) -> None:
    assert all(isinstance(outcome, Returned) for outcome in joined(tmp_path, SLOW))


def test_what_a_target_does_when_it_joins_does(tmp_path: Path) -> None:
    outcomes = joined(
        tmp_path,
        "def hangs():\n    import time\n    time.sleep(60)\n",
        activate="slow_target:hangs",
    )
    assert all(isinstance(outcome, StillRunning) for outcome in outcomes)


UNCLEAN = """
import os, time
from contextlib import contextmanager

@contextmanager
def hangs():
    yield
    time.sleep(60)

@contextmanager
def dies():
    yield
    os.abort()
"""


def left(tmp_path: Path, activate: str, worlds: int, deadline_s: float) -> list[list[Leak]]:
    """What two ranks leave behind in each of some worlds of a target that cannot end them."""
    (tmp_path / "unclean.py").write_text(UNCLEAN)
    target = replace(load_target("torch"), imports=("unclean",), activate=f"unclean:{activate}")
    spec = WorldSpec(target, 2, "cpu", 0, True, 60.0, (*sys.path, str(tmp_path)))
    pool = Pool()
    try:
        found = []
        for _ in range(worlds):
            pool.join(spec, 30.0)
            found.append(pool.leave(2, deadline_s))
        return found
    finally:
        pool.close()


def test_a_hang_while_groups_are_destroyed_is_a_timeout_and_costs_one_deadline(
    tmp_path: Path,
) -> None:
    first, *others = left(tmp_path, "hangs", 3, deadline_s=3.0)
    assert [leak.verdict for leak in first] == [Verdict.TIMEOUT] * 2
    assert all("in hangs" in str(leak) for leak in first)
    assert others == [[], []]


def test_a_death_while_groups_are_destroyed_is_a_crash(tmp_path: Path) -> None:
    for leaks in left(tmp_path, "dies", 2, deadline_s=20.0):
        assert worst(leak.verdict for leak in leaks) is Verdict.CRASHED
        assert "died: SIGABRT" in str(leaks[0])


def test_a_module_sees_the_environment_of_the_target_and_the_next_target_does_not(
    tmp_path: Path,
) -> None:
    (tmp_path / "reads_env.py").write_text("import os\nFOUND = os.environ['OF_TARGET']\n")
    (tmp_path / "reads_no_env.py").write_text(
        "import os\nimport reads_env\n"
        "assert reads_env.FOUND == 'a'\nassert 'OF_TARGET' not in os.environ\n"
    )
    torch = load_target("torch")
    pool = Pool()
    try:
        for module, env in ("reads_env", {"OF_TARGET": "a"}), ("reads_no_env", {}):
            target = replace(torch, imports=(module,), env=env)
            spec = WorldSpec(target, 1, "cpu", 0, False, 60.0, (*sys.path, str(tmp_path)))
            assert pool.join(spec, 30.0) == [Returned(None)]
            assert pool.leave(1, 20.0) == []
    finally:
        pool.close()


def test_ranks_that_cannot_be_started_are_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = WorldSpec(load_target("torch"), 1, "cpu", 0, False, 60.0, tuple(sys.path))
    world = Ranks(Pool(), spec, 30.0)
    monkeypatch.setattr(Pool, "_host", "203.0.113.7")  # of no interface
    with pytest.raises(HarnessFault, match="the loopback interface does not work here: ") as first:
        world.run(prints, 0, "")
    monkeypatch.undo()
    with pytest.raises(HarnessFault) as second:
        world.run(prints, 0, "")
    assert str(second.value) == str(first.value)
    assert "\n" not in str(first.value)
    assert verdict_of(first.value) is Verdict.UNKNOWN


def test_a_fork_server_whose_files_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def finds_no_socket(_: object) -> None:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(ForkServerProcess, "start", finds_no_socket)
    with pytest.raises(HarnessFault, match="has a rank removed the run's temporary files"):
        RankProcess(0)


def test_a_pool_that_had_ranks_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = WorldSpec(load_target("torch"), 1, "cpu", 0, False, 60.0, tuple(sys.path))
    pool = Pool()
    try:
        assert pool.join(spec, 30.0) == [Returned(None)]
        pool.close()
        monkeypatch.setattr(Pool, "_host", "203.0.113.7")
        with pytest.raises(HarnessFault):
            pool.join(spec, 30.0)
        pool.close()
        monkeypatch.undo()
        assert pool.join(spec, 30.0) == [Returned(None)]
    finally:
        pool.close()


def prints(me: Me, mib: int, end: str) -> None:
    """Lines of one KiB, and a last one."""
    for _ in range(mib):
        os.write(1, (b"x" * 1023 + b"\n") * 1024)
    os.write(1, end.encode())


def test_what_a_rank_prints_is_kept_however_much_it_has_printed_before() -> None:
    spec = WorldSpec(load_target("torch"), 1, "cpu", 0, False, 60.0, tuple(sys.path))
    pool = Pool()
    try:
        for number in range(4):  # 32 MiB in all, more than is kept of one run
            pool.join(spec, 30.0)
            pool.call([pack((prints, (8, f"the end of {number}")))], 30.0, wait_for_all=True)
            assert pool.outputs()[0].endswith(f"x\nthe end of {number}")
            before = 8 * 1024 * 1024 + len("the end of 0") - 64 * 1024
            assert pool.outputs()[0].startswith(f"({before} bytes before this)\nx")
            pool.leave(1, 20.0)
        pool.join(spec, 30.0)
        pool.call([pack((prints, (40, "the end")))], 30.0, wait_for_all=True)
        assert pool.outputs()[0].endswith("the end")
        pool.leave(1, 20.0)
        pool.join(spec, 30.0)
        pool.call([pack((prints, (0, "a word")))], 30.0, wait_for_all=True)
        assert pool.outputs() == ["a word"]
    finally:
        pool.close()
