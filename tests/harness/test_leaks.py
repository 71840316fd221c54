"""What a process holds, and the difference that a case makes."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.harness import leaks
from conformance.harness.leaks import Holdings, _difference, find_leaks, still_alive, take_census
from conformance.harness.me import Me
from conformance.harness.pool import Leak, Pool, WorldSpec
from conformance.harness.ranks import Ranks
from conformance.target import load_target

BEFORE = Holdings(
    threads={1: "main", 2: "pt_autograd_0"},
    python_threads={1: "MainThread"},
    descriptors=Counter({"socket": 2, "pipe": 1}),
    shared_memory=Counter(),
    children={},
)


@pytest.mark.parametrize(
    ("now", "leaks"),
    [
        (BEFORE, ()),
        (replace(BEFORE, threads={1: "main"}, descriptors=Counter()), ()),
        (
            replace(BEFORE, threads={1: "main", 7: "python"}, python_threads={7: "poller"}),
            ("thread 'poller'",),
        ),
        (replace(BEFORE, threads={1: "main", 7: "pt_gloo_runner"}), ("native thread 'pt_gloo_r",)),
        (replace(BEFORE, threads={1: "main", 7: "pt_autograd_1"}), ()),
        (replace(BEFORE, descriptors=Counter({"socket": 3})), ("1 descriptor of socket",)),
        (
            replace(BEFORE, descriptors=Counter({"/tmp/x": 2, "socket": 2})),
            ("2 descriptors of /tmp/x",),
        ),
        (
            replace(BEFORE, shared_memory=Counter({"/dev/shm/a": 2, "/memfd:b": 1})),
            ("shared memory /dev/shm/a (2 mappings)", "shared memory /memfd:b"),
        ),
        (replace(BEFORE, children={9: "sleep 9", 8: ""}), ("process 9: sleep", "process 8: a zo")),
    ],
)
def test_only_what_is_new_is_a_leak(now: Holdings, leaks: tuple[str, ...]) -> None:
    found = _difference(BEFORE, now)
    assert len(found) == len(leaks)
    assert all(text.startswith(start) for text, start in zip(found, leaks, strict=True))


def test_a_census_sees_processes() -> None:
    before = take_census()
    child = subprocess.Popen(["sleep", "300"])
    try:
        assert f"process {child.pid}: sleep 300" in _difference(before, take_census())
    finally:
        child.kill()
        child.wait()
    assert find_leaks(before) == ()


def test_a_census_says_which_processes_are_forks() -> None:
    before = take_census()
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    try:
        assert f"process {child}: a fork of this one" in _difference(before, take_census())
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_census_sees_threads_descriptors_and_shared_memory() -> None:
    before = take_census()
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait, name="counted")
    thread.start()
    fd = os.memfd_create("counted")
    os.ftruncate(fd, mmap.PAGESIZE)
    memory = mmap.mmap(fd, mmap.PAGESIZE)
    try:
        found = _difference(before, take_census())
        assert "thread 'counted'" in found
        assert any("descriptor" in leak and "counted" in leak for leak in found)
        assert any("shared memory /memfd:counted" in leak for leak in found)
    finally:
        memory.close()
        os.close(fd)
        ended.set()
        thread.join()
    assert find_leaks(before) == ()


class Group:
    """What a thread may hold."""


def test_a_thread_that_ends_may_be_the_last_to_hold_an_object() -> None:
    group = Group()
    watched = [("group", weakref.ref(group))]
    threading.Thread(target=lambda held: time.sleep(0.1), args=(group,)).start()
    del group
    assert still_alive(watched) == ()


def test_a_cycle_through_what_an_earlier_world_left_is_garbage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leaks, "_SETTLE_S", 0.01)

    class Kept:
        itself: Kept
        group: threading.Event

    kept = Kept()
    kept.itself = kept
    leaks.set_apart()  # as a rank does between worlds
    kept.group = threading.Event()
    watched = [("group", weakref.ref(kept.group))]
    del kept
    assert still_alive(watched) == ()


WAITS = """
def wait(group):
    future = torch.futures.Future()
    future.set_exception(RuntimeError("it failed"))
    try:
        future.wait()
    except RuntimeError:
        pass
"""


@pytest.mark.parametrize(
    ("module", "left"), [("conformance.spec.made", ()), ("backend", ("a group",))]
)
def test_a_future_that_failed_keeps_nothing_of_a_case(
    module: str, left: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch keeps the frame that waited for it, until that is emptied."""
    monkeypatch.setattr(leaks, "_SETTLE_S", 0.01)
    waiting: dict[str, Any] = {"__name__": module, "torch": torch}
    exec(WAITS, waiting)
    group = Counter[str]()
    waiting["wait"](group)
    watched = [("a group", weakref.ref(group))]
    del group
    assert still_alive(watched) == left


def test_an_object_that_stays_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "_SETTLE_S", 0.05)
    group, other = Group(), Group()
    watched = [("group", weakref.ref(group)), ("other", weakref.ref(other))]
    del other
    assert still_alive(watched) == ("group",)


FOR_LIFE = """
import threading
from contextlib import contextmanager

progress = None

def start(name="progress"):
    thread = threading.Thread(target=threading.Event().wait, name=name, daemon=True)
    thread.start()
    return thread

@contextmanager
def once_in_a_process():
    global progress
    progress = progress or start()
    yield

@contextmanager
def once_in_a_world():
    start()
    yield

@contextmanager
def more_in_the_first_two_worlds():
    with open(__file__ + ".worlds", "a+") as worlds:
        worlds.write(".")
        worlds.seek(0)
        if len(worlds.read()) <= 2:
            start("early")
    with once_in_a_process():
        yield
"""


def spec_of(tmp_path: Path, activate: str) -> WorldSpec:
    """One rank of torch's gloo, beside what a context manager above does."""
    (tmp_path / "for_life.py").write_text(FOR_LIFE)
    target = replace(load_target("torch"), imports=("for_life",), activate=f"for_life:{activate}")
    return WorldSpec(target, 1, "cpu", 0, True, 60.0, (*sys.path, str(tmp_path)))


def left_in_two_worlds(tmp_path: Path, activate: str) -> tuple[list[str], bool]:
    """What two worlds of one rank leave behind, and whether they had the same process."""
    spec = spec_of(tmp_path, activate)
    pool = Pool()
    try:
        leaks, processes = [], set()
        for _ in range(2):
            world = Ranks(pool, spec, 30.0)
            processes |= {*world.run(os_pid)}
            world.renew()
            leaks += [str(leak) for leak in world.leaks]
        return leaks, len(processes) == 1
    finally:
        pool.close()


def os_pid(me: Me) -> int:
    return os.getpid()


def test_what_a_process_keeps_from_its_first_world_on_is_no_leak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    assert left_in_two_worlds(tmp_path, "once_in_a_process") == ([], True)


def test_what_every_world_leaves_is_a_leak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    leaks, same_process = left_in_two_worlds(tmp_path, "once_in_a_world")
    assert leaks == ["rank 0 left behind: thread 'progress'"] * 2
    assert not same_process


def test_a_world_that_leaves_something_does_not_make_all_else_a_leak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    leaks, same_process = left_in_two_worlds(tmp_path, "more_in_the_first_two_worlds")
    assert leaks == ["rank 0 left behind: thread 'early'"]
    assert not same_process


@pytest.mark.parametrize(
    ("first", "again"),
    [
        ("2 descriptors of pipe", "1 descriptor of pipe"),
        ("shared memory /dev/shm/psm_1fa (2 mappings)", "shared memory /dev/shm/psm_c07"),
        ("native thread 'io-1'", "native thread 'io-12'"),
        ("process 12: sleep 1", "process 345: sleep 1"),
    ],
)
def test_the_same_is_left_again_under_other_numbers_and_names(first: str, again: str) -> None:
    assert Leak(0, first).kind == Leak(1, again).kind
    assert Leak(0, first).kind != Leak(0, "3 descriptors of socket").kind


@pytest.mark.parametrize("excused", [False, True])
def test_what_a_world_left_that_broke_off_as_declared_counts_for_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, excused: bool
) -> None:
    """What each world of a target leaves is not looked at twice. That of an excused one is."""
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = spec_of(tmp_path, "more_in_the_first_two_worlds")
    pool = Pool()
    try:
        left = []
        for _ in range(2):
            world = Ranks(pool, spec, 30.0)
            world.run(os_pid)
            world.renew()
            left.append([leak.kind for leak in world.leaks])
            pool._left_by_each[spec.target.name, spec.target.backend].add("thread 'progress'")
            if excused:
                pool.excuse(spec.target)
    finally:
        pool.close()
    assert left == [["thread 'early'"], [] if excused else ["thread 'progress'"]]
