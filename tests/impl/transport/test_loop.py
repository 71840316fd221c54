"""The event loop: waiting callers drive it, the helper drives it otherwise."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from impl.transport.sockets.loop import EventLoop, Timers

PATIENCE_S = 20.0


@dataclass
class Flag:
    done: bool = False
    was_set: threading.Event = field(default_factory=threading.Event)

    def set(self) -> None:
        self.done = True
        self.was_set.set()


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    with left, right:
        yield left, right


@pytest.fixture
def loop(pair: tuple[socket.socket, socket.socket]) -> Iterator[EventLoop]:
    """Closed before the sockets that it may still be reading from."""
    each = EventLoop("test")
    yield each
    each.close()


def set_when_readable(loop: EventLoop, sock: socket.socket) -> tuple[Flag, list[str]]:
    """A flag that is set by the byte `d`; the names of the threads that have read bytes."""
    flag, readers = Flag(), list[str]()

    def on_events(_: int) -> None:
        readers.append(threading.current_thread().name)
        if sock.recv(1) == b"d":
            flag.set()

    with loop.lock:
        loop.register(sock.fileno(), select.EPOLLIN, on_events)
    return flag, readers


def test_a_caller_drives_the_loop_itself(
    loop: EventLoop, pair: tuple[socket.socket, socket.socket]
) -> None:
    flag, readers = set_when_readable(loop, pair[0])
    pair[1].send(b"d")
    assert loop.run_until(flag, time.monotonic() + PATIENCE_S)
    assert len(readers) == 1


def test_a_caller_that_waits_too_long_is_told(loop: EventLoop) -> None:
    assert not loop.run_until(Flag(), time.monotonic() + 0.01)
    assert not loop.run_until(Flag(), time.monotonic() - 1)
    assert loop.run_until(Flag(done=True), time.monotonic() - 1)


def test_the_helper_drives_when_nobody_waits(
    loop: EventLoop, pair: tuple[socket.socket, socket.socket]
) -> None:
    flag, readers = set_when_readable(loop, pair[0])
    pair[1].send(b"d")
    assert flag.was_set.wait(PATIENCE_S)
    assert readers == ["test helper"]


def test_many_callers_are_served_by_one_driver(loop: EventLoop) -> None:
    pairs = [socket.socketpair() for _ in range(8)]
    flags = [set_when_readable(loop, left)[0] for left, _ in pairs]
    results: list[bool] = []
    callers = [
        threading.Thread(
            target=lambda flag=flag: results.append(
                loop.run_until(flag, time.monotonic() + PATIENCE_S)
            )
        )
        for flag in flags
    ]
    for caller in callers:
        caller.start()
    for _, right in reversed(pairs):
        right.send(b"xd")
    for caller in callers:
        caller.join()
    assert results == [True] * 8
    for left, right in pairs:
        with loop.lock:
            loop.unregister(left.fileno())
        left.close()
        right.close()


def test_a_change_made_by_another_thread_ends_the_wait(loop: EventLoop) -> None:
    flag = Flag()

    def change() -> None:
        with loop.lock:
            flag.set()
            loop.notify()

    with loop.lock:
        loop.call_at(time.monotonic(), lambda: threading.Thread(target=change).start())
    assert loop.run_until(flag, time.monotonic() + PATIENCE_S)


def test_timers_fire_while_a_caller_waits_and_while_nobody_does(loop: EventLoop) -> None:
    flag, late = Flag(), threading.Event()
    with loop.lock:
        loop.call_at(time.monotonic() + 0.01, flag.set)
    assert loop.run_until(flag, time.monotonic() + PATIENCE_S)
    with loop.lock:
        loop.call_at(time.monotonic() + 0.01, late.set)
    assert late.wait(PATIENCE_S)


def test_posted_work_brings_the_helper_back_at_once(
    loop: EventLoop, pair: tuple[socket.socket, socket.socket]
) -> None:
    flag, _ = set_when_readable(loop, pair[0])
    loop.run_until(Flag(), time.monotonic() + 0.001)  # a caller has just been here
    with loop.lock:
        loop.message_posted()
    pair[1].send(b"d")
    assert flag.was_set.wait(PATIENCE_S)


def test_calls_that_were_put_off_run_without_the_lock(loop: EventLoop) -> None:
    seen = []
    with loop.lock:
        loop.defer(lambda: seen.append(loop.lock.locked()))
    loop.run_deferred()
    assert seen == [False]


def test_closing_ends_the_helper_and_may_be_repeated() -> None:
    before = len(os.listdir("/proc/self/fd"))
    loop = EventLoop("closed")
    loop.close()
    loop.close()
    assert not any(thread.name == "closed helper" for thread in threading.enumerate())
    assert len(os.listdir("/proc/self/fd")) == before
    assert not loop.run_until(Flag(), time.monotonic() + PATIENCE_S), "nobody waits for ever"


def test_closing_waits_until_no_other_thread_drives() -> None:
    loop = EventLoop("test")
    entered = threading.Event()
    loop.on_flush.append(entered.set)
    ended: list[bool] = []
    caller = threading.Thread(
        target=lambda: ended.append(loop.run_until(Flag(), time.monotonic() + 60))
    )
    caller.start()
    assert entered.wait(30)
    loop.close()
    assert not loop._is_driven
    caller.join(30)
    assert ended == [False]


def test_a_forked_child_lets_go_of_everything() -> None:
    loop = EventLoop("parent")
    left, right = socket.socketpair()
    flag, _ = set_when_readable(loop, left)
    loop.on_fork.append(left.close)
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: there are threads
        pid = os.fork()
    if pid == 0:
        os.write(writer, b"closed" if loop._is_closed and left.fileno() < 0 else b"open")
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reader, 10) == b"closed"
    right.send(b"d")
    assert loop.run_until(flag, time.monotonic() + PATIENCE_S), "the parent has not noticed"
    os.close(reader)
    os.close(writer)
    loop.close()
    left.close()
    right.close()


def test_timers_run_in_order_and_cancelled_ones_do_not_pile_up() -> None:
    timers, ran = Timers(), list[int]()
    for due in (3, 1, 2, 1):
        timers.add(due, lambda due=due: ran.append(due))  # type: ignore[misc]  # as above
    timers.run_due(2)
    assert ran == [1, 1, 2]
    assert timers.next_due_s() == 3
    for i in range(10_000):
        timers.add(100 + i, lambda: None).cancel()
    assert len(timers._heap) < 1000
    timers.run_due(1e9)
    assert ran == [1, 1, 2, 3]
