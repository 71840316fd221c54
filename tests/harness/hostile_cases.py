"""Cases whose ranks attack the harness, each followed by one that behaves."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance import Me, Ranks, covers, deadline, world_sizes
from conformance.rule import MUST, Requirement


class Exits:
    def __reduce__(self) -> Any:
        return os._exit, (0,)


class Interrupts:
    def __reduce__(self) -> Any:
        return interrupt, ()


class HangsWhenShown:
    def __repr__(self) -> str:
        while True:
            time.sleep(1)


class ShownByItself:
    def __repr__(self) -> str:
        return repr(self)


class ExitsInItsText(Exception):
    def __str__(self) -> str:
        os._exit(0)


class LeavesInItsText(Exception):
    def __str__(self) -> str:
        sys.exit(0)


class InterruptsInItsText(Exception):
    def __str__(self) -> str:
        raise KeyboardInterrupt


def interrupt() -> None:
    raise KeyboardInterrupt


def connections() -> Iterator[int]:
    """The descriptors by which this process may be connected with the harness."""
    for fd in range(3, 256):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as connected:
            if connected.family == socket.AF_UNIX:
                yield fd


def returns_what_exits(me: Me) -> Any:
    return Exits()


def returns_what_interrupts(me: Me) -> Any:
    return Interrupts()


def raises_an_interrupt(me: Me) -> None:
    raise KeyboardInterrupt


def raises_what_exits(me: Me) -> None:
    raise ExitsInItsText


def raises_what_leaves(me: Me) -> None:
    raise LeavesInItsText


def raises_what_interrupts(me: Me) -> None:
    raise InterruptsInItsText


def raises_a_chain(me: Me) -> None:
    error = ValueError("the first")
    for number in range(3000):
        later = ValueError(f"number {number}")
        later.__cause__ = error
        error = later
    raise error


def raises_a_long_text(me: Me) -> None:
    raise ValueError("x" * 10_000_000)


def returns_what_hangs_when_shown(me: Me) -> Any:
    return HangsWhenShown()


def returns_what_is_shown_by_itself(me: Me) -> Any:
    return ShownByItself()


def returns_a_circle(me: Me) -> Any:
    circle: list[Any] = []
    circle.append(circle)
    return circle


def returns_ten_gigabytes(me: Me) -> Any:
    return torch.empty(1).expand(2_500_000_000)


def writes_what_looks_like_a_length(me: Me) -> None:
    for fd in connections():
        os.write(fd, b"\0\1\0\0")
    signal.pause()


def writes_stray_bytes(me: Me) -> None:
    for fd in connections():
        os.write(fd, b"hello")


def closes_its_descriptors(me: Me) -> None:
    os.closerange(3, 256)
    signal.pause()


def shortens_what_it_shares(me: Me) -> None:
    for fd in range(3, 256):
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
    raise ValueError("after that")


def fills_what_it_shares(me: Me) -> None:
    for fd in range(3, 256):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:rank-"):
                os.pwrite(fd, b"\xff" * 4096, 0)
    signal.pause()


def stops_the_fork_server(me: Me) -> None:
    if me.rank == 0:
        os.kill(os.getppid(), signal.SIGSTOP)
    raise ValueError("after that")


def becomes_a_daemon(session: bool) -> None:
    """Leave a process behind that no longer is a child of this one."""
    child = os.fork()
    if child == 0:
        if session:
            os.setsid()
        if os.fork() == 0:
            time.sleep(1000)
        os._exit(0)
    os.waitpid(child, 0)


def leaves_a_daemon(me: Me) -> None:
    becomes_a_daemon(session=True)


def leaves_a_daemon_and_dies(me: Me) -> None:
    becomes_a_daemon(session=True)
    os._exit(0)


def leaves_what_ends(me: Me) -> None:
    """An orphan that soon ends."""
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(0.2)
        os._exit(0)
    os.waitpid(child, 0)


def behaves(me: Me) -> int:
    return me.world_size


def requirement(name: str) -> Requirement:
    return Requirement(
        id=f"hostile/{name.replace('_', '-')}",
        level=MUST,
        profile="faults",
        says="The rank behaves.",
        source="a test of the harness",
    )


HOSTILE = [
    returns_what_exits,
    returns_what_interrupts,
    raises_an_interrupt,
    raises_what_exits,
    raises_what_leaves,
    raises_what_interrupts,
    raises_a_chain,
    raises_a_long_text,
    returns_what_hangs_when_shown,
    returns_what_is_shown_by_itself,
    returns_a_circle,
    returns_ten_gigabytes,
    writes_what_looks_like_a_length,
    writes_stray_bytes,
    closes_its_descriptors,
    shortens_what_it_shares,
    fills_what_it_shares,
    stops_the_fork_server,
    leaves_a_daemon,
    leaves_a_daemon_and_dies,
    leaves_what_ends,
]


# They take the whole of their deadline; for the others it is patience.
HANGING = [returns_what_hangs_when_shown, fills_what_it_shares]


def in_turn() -> Iterator[Any]:
    """Each attack, and after it a case that behaves."""
    for hostile in HOSTILE:
        name = hostile.__name__
        marks = [covers(requirement(name)), *([deadline(2)] if hostile in HANGING else [])]
        yield pytest.param(hostile, marks=marks, id=name)
        after = f"behaves_after_{name}"
        yield pytest.param(behaves, marks=covers(requirement(after)), id=after)


@pytest.mark.parametrize("function", list(in_turn()))
@world_sizes(2)
def test_hostile(ranks: Ranks, function: Any) -> None:
    assert ranks.run(function) == [2 if function is behaves else None] * 2


def stops_soon(me: Me) -> int:
    """It has returned when it is stopped."""

    def stop() -> None:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGSTOP)

    threading.Thread(target=stop, daemon=True).start()
    return os.getpid()


def takes(me: Me, argument: torch.Tensor) -> None:
    """Nothing is done with it."""


@covers(requirement("stopped_before_large_arguments"))
@world_sizes(2)
@deadline(2)
def test_stopped(ranks: Ranks) -> None:
    for pid in ranks.run(stops_soon):
        while ") T " not in Path(f"/proc/{pid}/stat").read_text():
            time.sleep(0.02)
    ranks.run(takes, torch.zeros(4_000_000))
