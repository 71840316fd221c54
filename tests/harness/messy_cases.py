"""Cases whose ranks misbehave; test_messy.py runs a copy of this file and checks the outcome.

After each of them a case runs that behaves: it must pass, whatever happened before it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing import shared_memory
from typing import Any

import pytest
import torch
import torch.distributed as dist

from conformance import Me, Ranks, assert_same_on_all_ranks, covers, deadline, world_sizes
from conformance.rule import MUST, Requirement

_KEPT: list[Any] = []


def raises(me: Me) -> int:
    """Every rank but one waits for the one that raises."""
    if me.rank == 1:
        raise ValueError("bad luck")
    dist.all_reduce(torch.ones(2, device=me.device))
    return me.rank


def exits_with_0(me: Me) -> None:
    if me.rank == 1:
        os._exit(0)


def exits_with_3(me: Me) -> None:
    if me.rank == 0:
        os._exit(3)


def leaves_by_sys_exit(me: Me) -> None:
    if me.rank == 0:
        sys.exit("enough")


def segfaults(me: Me) -> None:
    if me.rank == 1:
        ctypes.string_at(0)


def is_killed(me: Me) -> None:
    if me.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def sleeps_in_python(me: Me) -> None:
    while me.rank == 1:
        time.sleep(1)


def blocks_in_c(me: Me) -> None:
    libc = ctypes.CDLL(None)
    while me.rank == 1:
        libc.sleep(1000)


def blocks_in_c_with_the_gil(me: Me) -> None:
    libc = ctypes.PyDLL(None)
    while me.rank == 1:
        libc.sleep(1000)


def is_stopped(me: Me) -> None:
    if me.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


def one_does_not_join_in(me: Me) -> None:
    x = torch.ones(5, device=me.device)
    if me.rank != 1:
        dist.all_reduce(x)


def disagrees(me: Me) -> torch.Tensor:
    return torch.full((3,), 1.0 + (me.rank == 1))


def prints_a_lot(me: Me) -> None:
    line = "x" * 1023
    for _ in range(2000):
        print(line)
    print("the last line", flush=True)
    raise RuntimeError("after all that")


def reads_stdin(me: Me) -> str:
    return sys.stdin.read() + os.read(0, 100).decode()


def writes_to_stdin(me: Me) -> None:
    os.write(0, b"hello")


def returns_a_lock(me: Me) -> Any:
    return threading.Lock()


def keeps_a_group(me: Me) -> None:
    _KEPT.append(dist.new_group())


def keeps_a_thread(me: Me) -> None:
    threading.Thread(target=threading.Event().wait, name="poller", daemon=True).start()


def keeps_a_descriptor(me: Me) -> None:
    os.open("/dev/zero", os.O_RDONLY)


def keeps_shared_memory(me: Me) -> None:
    segment = shared_memory.SharedMemory(create=True, size=4096)
    segment.unlink()
    _KEPT.append(segment)


def starts_a_process(me: Me) -> None:
    """Its child outlives the call and must not outlive the run."""
    if os.fork() == 0:
        while True:
            time.sleep(1000)


def kills_the_fork_server(me: Me) -> None:
    if me.rank == 0:
        os.kill(os.getppid(), signal.SIGKILL)
    signal.pause()


def behaves(me: Me) -> torch.Tensor:
    x = torch.full((4,), float(me.rank + 1), device=me.device)
    dist.all_reduce(x)
    return x


def requirement(name: str) -> Requirement:
    return Requirement(
        id=f"messy/{name.replace('_', '-')}",
        level=MUST,
        profile="faults",
        says="The rank behaves.",
        source="a test of the harness",
    )


MESSY = [
    raises,
    exits_with_0,
    exits_with_3,
    leaves_by_sys_exit,
    segfaults,
    is_killed,
    sleeps_in_python,
    blocks_in_c,
    blocks_in_c_with_the_gil,
    is_stopped,
    one_does_not_join_in,
    disagrees,
    prints_a_lot,
    reads_stdin,
    writes_to_stdin,
    returns_a_lock,
    keeps_a_group,
    keeps_a_thread,
    keeps_a_descriptor,
    keeps_shared_memory,
    starts_a_process,
    kills_the_fork_server,
]
HANGING = {
    sleeps_in_python,
    blocks_in_c,
    blocks_in_c_with_the_gil,
    is_stopped,
    one_does_not_join_in,
}


def in_turn() -> Iterator[Any]:
    """Each case that misbehaves, and after it one that behaves."""
    for messy in MESSY:
        name = messy.__name__
        marks = [covers(requirement(name)), *([deadline(3)] if messy in HANGING else [])]
        yield pytest.param(messy, marks=marks, id=name)
        after = f"behaves_after_{name}"
        yield pytest.param(behaves, marks=covers(requirement(after)), id=after)


@pytest.mark.parametrize("function", list(in_turn()))
@world_sizes(2)
def test_messy(ranks: Ranks, function: Any) -> None:
    got = ranks.run(function)
    assert_same_on_all_ranks(got)


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="it would end the whole run")
@covers(requirement("worker_dies"))
@world_sizes(2)
def test_worker_dies(ranks: Ranks) -> None:
    ranks.run(behaves)
    os._exit(9)
