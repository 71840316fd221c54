"""Finds leaks of a case in a rank process: threads, descriptors, shared memory, child processes."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from conformance.harness.devices import DRIVER_FILES, THREADS_FOR_LIFE

_SETTLE_S = 3.0
_PAUSE_S = (0.001, 0.5)  # between looks, each of which takes long: from, doubling, up to
_PR_SET_CHILD_SUBREAPER = 36  # of <sys/prctl.h>
_SHOWN_OF_COMMAND = 80
_SHARED_MAPPING = re.compile(r" ((?:/dev/shm/|/memfd:).*)$", re.MULTILINE)  # of proc(5), maps
_STATE, _PARENT = 0, 1  # fields of /proc/PID/stat
_is_apart = False  # whether an earlier world's objects are


@dataclass(frozen=True, slots=True)
class Holdings:
    """A census of one process.

    threads: thread id -> name as the kernel has it.
    python_threads: thread id -> name as Python has it.
    descriptors: what the open descriptors refer to, counted ("socket", "/tmp/x", "pipe").
    shared_memory: names of mapped files in shared memory.
    children: process id -> command line.
    """

    threads: dict[int, str]
    python_threads: dict[int, str]
    descriptors: Counter[str]
    shared_memory: Counter[str]
    children: dict[int, str]


def take_census() -> Holdings:
    """What this process holds now."""
    return Holdings(
        threads=_threads(),
        python_threads={t.native_id or 0: t.name for t in threading.enumerate()},
        descriptors=_descriptors(),
        shared_memory=_shared_memory(),
        children=_children(),
    )


def find_leaks(before: Holdings) -> tuple[str, ...]:
    """What this process holds beyond `before`, one phrase each.

    Threads and sockets of a destroyed group may take a moment to go.
    """
    return find_leaks_and_census(before)[0]


def find_leaks_and_census(before: Holdings) -> tuple[tuple[str, ...], Holdings]:
    """As `find_leaks`, with the census that it came from."""
    now = before

    def look() -> tuple[str, ...]:
        nonlocal now
        now = take_census()
        return _difference(before, now)

    return _settled(look), now


def still_alive(watched: Sequence[tuple[str, weakref.ref[Any]]]) -> tuple[str, ...]:
    """The names of those objects that are still referenced.

    A thread of a destroyed group holds the group until it ends.
    """

    def look() -> tuple[str, ...]:
        return tuple(name for name, object in watched if object() is not None)

    if not _settled(look):
        return ()
    _empty_frames_of_cases()
    gc.collect()
    return look()


def _empty_frames_of_cases() -> None:
    """Drop what functions of cases have held that are over.

    A failed future of torch keeps its exception, whose traceback keeps the frame of the case that
    waited, which keeps the future: a cycle through C++, which Python does not find.
    """
    for found in gc.get_objects():
        if type(found) is FrameType and _is_of_a_case(found):
            with suppress(RuntimeError):  # it still runs
                found.clear()


def _is_of_a_case(frame: FrameType) -> bool:
    module = frame.f_globals.get("__name__", "")
    return isinstance(module, str) and module.startswith("conformance.spec.")


def _settled(look: Callable[[], tuple[str, ...]]) -> tuple[str, ...]:
    """What is still seen when looking again for up to `_SETTLE_S`; () as soon as nothing is."""
    give_up_at = time.monotonic() + _SETTLE_S
    pause_s, longest_s = _PAUSE_S
    while True:
        seen = look()
        if not seen:
            return seen
        if time.monotonic() > give_up_at:
            return look() if _reconsider() else seen
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, longest_s)
        gc.collect()


def set_apart() -> None:
    """What a world has left, such as caches, lives on: the next one need not look through it."""
    global _is_apart
    gc.freeze()
    _is_apart = True


def _reconsider() -> bool:
    """Collect all the same: a cycle may lead through what an earlier world has left.

    False if nothing was set apart, so that nothing new can be found.
    """
    global _is_apart
    if not _is_apart:
        return False
    gc.unfreeze()  # all that was imported, too: to collect that takes a second
    gc.collect()
    _is_apart = False
    return True


def _difference(before: Holdings, now: Holdings) -> tuple[str, ...]:
    leaks = []
    for id, name in now.threads.items():
        if id not in before.threads and not name.startswith(THREADS_FOR_LIFE):
            python_name = now.python_threads.get(id)
            leaks.append(f"thread {python_name!r}" if python_name else f"native thread {name!r}")
    for name, count in (now.descriptors - before.descriptors).items():
        leaks.append(f"{count} descriptor{'s' if count > 1 else ''} of {name}")
    for name, count in (now.shared_memory - before.shared_memory).items():
        leaks.append(f"shared memory {name}{f' ({count} mappings)' if count > 1 else ''}")
    for id, command in now.children.items():
        if id not in before.children:
            leaks.append(f"process {id}: {command or 'a zombie'}")
    return tuple(leaks)


def _threads() -> dict[int, str]:
    found = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            found[int(task.name)] = (task / "comm").read_text().strip()
        except OSError:  # it has ended since
            continue
    return found


def _descriptors() -> Counter[str]:
    found: Counter[str] = Counter()
    for entry in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:  # the descriptor of this very listing
            continue
        if name.startswith(("/proc/self/", *DRIVER_FILES)) or name.endswith("/fd"):
            continue
        found[name.split(":[", 1)[0]] += 1  # "socket:[123]" is one more socket, whatever its number
    return found


def _shared_memory() -> Counter[str]:
    return Counter(_SHARED_MAPPING.findall(Path("/proc/self/maps").read_text()))


def _children() -> dict[int, str]:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # there are none, which is quickly told
        return {}
    found = {}
    for child in children_by_parent().get(os.getpid(), ()):
        with suppress(OSError):  # it has ended since
            if not _is_ended_orphan(child):
                found[child] = _command(Path(f"/proc/{child}/cmdline").read_bytes())
    return found


def _is_ended_orphan(child: int) -> bool:
    """Whether it was adopted and has ended; if so, it is reaped."""
    of_another_session = _stat(child)[_STATE] == "Z" and os.getsid(child) != os.getsid(0)
    return of_another_session and os.waitpid(child, os.WNOHANG)[0] == child


def adopt_orphans() -> None:
    """Have descendants whose parents end become children of this process, where Linux does that."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children_by_parent() -> dict[int, list[int]]:
    """The number of each process that can be seen -> those of its children."""
    found: dict[int, list[int]] = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended since
            pid = int(process.name)
            found.setdefault(int(_stat(pid)[_PARENT]), []).append(pid)
    return found


def _stat(pid: int) -> list[str]:
    """The fields after the name, see proc(5)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _command(words: bytes) -> str:
    if words == Path("/proc/self/cmdline").read_bytes():
        return "a fork of this one"
    return words.decode(errors="replace").replace("\0", " ")[:_SHOWN_OF_COMMAND].strip()
