"""What a process holds, and the difference that a case makes."""

from __future__ import annotations

import mmap
import os
import threading
from collections import Counter
from dataclasses import replace

import pytest

from conformance.harness.leaks import Holdings, _difference, find_leaks, take_census

BEFORE = Holdings(
    threads={1: "main", 2: "pt_autograd_0"},
    python_threads={1: "MainThread"},
    descriptors=Counter({"socket": 2, "pipe": 1}),
    shared_memory=Counter(),
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
    ],
)
def test_only_what_is_new_is_a_leak(now: Holdings, leaks: tuple[str, ...]) -> None:
    found = _difference(BEFORE, now)
    assert len(found) == len(leaks)
    assert all(text.startswith(start) for text, start in zip(found, leaks, strict=True))


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
