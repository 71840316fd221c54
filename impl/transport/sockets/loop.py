"""Event loop (epoll and timers), driven by a thread that waits, or by a helper thread.

[Note: who drives]
A thread that waits for a message would only be slowed down by another thread that reads the
message for it: the hand-over costs more than the work. So the loop has no thread of its own that
must run. A waiting caller takes the *driver's* seat, polls and handles what comes, for itself and
for all others. Further callers that wait meanwhile sleep until the driver has handled
something or leaves.

That leaves no thread to handle what comes while no caller waits: messages that were posted and left
to themselves, and peers that die. A helper thread does that. It steps back while callers come and
go, because it would wake up with them at every event; it returns when a caller leaves while posted
messages are under way, or when no caller has come for HELPER_PATIENCE_S.

[Note: the lock]
Everything behind the loop (hubs, exchanges, links, timers) is touched with `lock` held, and never
blocks. Callbacks of users run after it has been released: they are put off by `defer`. Where a
signal's handler raises (Ctrl-C) while something is half changed, `on_broken_off` is told.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import select
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from impl.schedules.executor import Pending
from impl.transport.background import BackgroundThread

logger = logging.getLogger(__name__)

HELPER_PATIENCE_S = 0.05
POLL_SLICE_S = 3600.0  # poll takes no infinite number of milliseconds


class Timer:
    """A call that is to happen at a time."""

    __slots__ = ("_timers", "callback", "due_s", "is_over")

    def __init__(self, timers: Timers, due_s: float, callback: Callable[[], None]) -> None:
        self._timers = timers
        self.due_s = due_s
        self.callback = callback
        self.is_over = False

    def cancel(self) -> None:
        if not self.is_over:
            self.is_over = True
            self._timers.one_was_cancelled()


class Timers:
    """Calls in the order in which they are due."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Timer]] = []
        self._tie_breaker = itertools.count()
        self._cancelled = 0  # that are still in the heap

    def add(self, due_s: float, callback: Callable[[], None]) -> Timer:
        timer = Timer(self, due_s, callback)
        heapq.heappush(self._heap, (due_s, next(self._tie_breaker), timer))
        return timer

    def one_was_cancelled(self) -> None:
        # Most timers are deadlines far away that are never reached: without this they would pile
        # up.
        self._cancelled += 1
        if self._cancelled > 100 + len(self._heap) // 2:
            self._heap = [entry for entry in self._heap if not entry[2].is_over]
            heapq.heapify(self._heap)
            self._cancelled = 0

    def next_due_s(self) -> float | None:
        while self._heap and self._heap[0][2].is_over:
            heapq.heappop(self._heap)
            self._cancelled -= 1
        return self._heap[0][0] if self._heap else None

    def run_due(self, now_s: float) -> None:
        while (due_s := self.next_due_s()) is not None and due_s <= now_s:
            _, _, timer = heapq.heappop(self._heap)
            timer.is_over = True
            timer.callback()


class Loop(Protocol):
    """What a group needs of a loop. The simulation has one of its own."""

    @property
    def lock(self) -> AbstractContextManager[object]:
        """Guards the group and all below it."""

    def now(self) -> float: ...

    def call_at(self, due_s: float, callback: Callable[[], None]) -> Timer: ...

    def notify(self) -> None:
        """Something has changed that a thread may wait for. With the lock held."""

    def defer(self, callback: Callable[[], None]) -> None:
        """Call back soon, without the lock."""

    def run_deferred(self) -> None:
        """Make the calls that were put off. Without the lock."""


class EventLoop:
    """An epoll loop over non-blocking descriptors."""

    def __init__(self, name: str) -> None:
        self.lock = threading.Lock()
        self.on_flush: list[Callable[[], None]] = []  # before each poll: write what is queued
        self._changed = threading.Condition(self.lock)  # the driver has handled events, or left
        self._helper_may_go_on = threading.Condition(self.lock)
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._timers = Timers()
        self._deferred: list[Callable[[], None]] = []
        self.on_fork: list[Callable[[], None]] = []  # called in a forked child
        self.on_broken_off: list[Callable[[BaseException], None]] = []  # with the lock held
        self._is_driven = False
        self._driver = 0  # the thread that drives, or the last one that did
        self._is_polled = False  # by the driver
        self._helper_wakes_s = 0.0  # when the helper's poll ends by itself; 0: it does not poll
        self._sleepers = 0  # callers that wait for the driver
        self._under_way = 0  # posted messages that have not ended
        self._last_driven_s = 0.0
        self._is_closed = False
        self._helper = BackgroundThread(self._help, name=f"{name} helper")
        self._helper.start()
        _LOOPS.add(self)

    # Descriptors and timers: with the lock held

    def register(self, fd: int, events: int, handler: Callable[[int], None]) -> None:
        self._handlers[fd] = handler
        self._epoll.register(fd, events)

    def modify(self, fd: int, events: int) -> None:
        self._epoll.modify(fd, events)

    def unregister(self, fd: int) -> None:
        if self._handlers.pop(fd, None) is not None and not self._epoll.closed:
            self._epoll.unregister(fd)

    def now(self) -> float:
        return time.monotonic()

    def call_at(self, due_s: float, callback: Callable[[], None]) -> Timer:
        before_s = self._timers.next_due_s()
        timer = self._timers.add(due_s, callback)
        if before_s is None or due_s < before_s:
            self._wake_pollers()
        return timer

    def defer(self, callback: Callable[[], None]) -> None:
        self._deferred.append(callback)

    def message_posted(self) -> None:
        """A message was posted, and must complete even if no thread waits for it."""
        self._under_way += 1
        if not self._is_driven:
            self._helper_may_go_on.notify()

    def message_ended(self) -> None:
        """A message that was posted has ended."""
        self._under_way -= 1

    def undivided(self, change: Callable[[], None]) -> None:
        """Make a change that must not be broken off; if it is, those who can act on it are told."""
        try:
            change()
        except BaseException as error:
            for tell in self.on_broken_off:
                tell(error)
            raise

    # Driving

    def run_until(self, pending: Pending, at_s: float) -> bool:
        """Drive the loop until `pending.done`, or until the time `at_s`: True if it is done."""
        with self.lock:
            self.undivided(self._flush)
        try:
            while True:
                with self.lock:
                    if pending.done:
                        self._leave()
                        break
                    timeout_s = at_s - time.monotonic()
                    if self._is_closed or timeout_s <= 0:
                        return False
                    if self._is_driven:
                        self._sleep(timeout_s)
                        continue
                    timeout_s = self._take_seat(timeout_s)
                self._drive_once(timeout_s)
        except BaseException:  # a signal's handler may raise between taking the seat and driving
            self._leave_seat()
            raise
        self.run_deferred()
        return True

    def _sleep(self, timeout_s: float) -> None:
        """Until the driver has handled events, or has left."""
        self._sleepers += 1
        try:
            self._changed.wait(timeout_s)
        finally:
            self._sleepers -= 1

    def run_deferred(self) -> None:
        """Make the calls that were put off. Without the lock."""
        while self._deferred:
            with self.lock:
                callbacks, self._deferred = self._deferred, []
            for callback in callbacks:
                callback()

    def _leave(self) -> None:
        """A caller stops driving: wake the helper if there is still work."""
        self._last_driven_s = time.monotonic()
        if self._is_driven:
            return
        if self._under_way:
            self._helper_may_go_on.notify()
        if self._helper_wakes_s:
            # The driver may have swallowed the event that was to tell the helper of a new timer.
            due_s = self._timers.next_due_s()
            if due_s is not None and due_s < self._helper_wakes_s:
                self._wake_pollers()

    def notify(self) -> None:
        """Something has changed that callers may wait for. With the lock held, from any thread."""
        if self._sleepers:
            self._changed.notify_all()
        self._wake_pollers()

    def _wake_pollers(self) -> None:
        if self._is_polled or self._helper_wakes_s:
            os.eventfd_write(self._wake_fd, 1)

    def _flush(self) -> None:
        for flush in self.on_flush:
            flush()

    def _take_seat(self, timeout_s: float) -> float:
        """This thread drives. How long it may poll, at most `timeout_s`."""
        self._driver = threading.get_ident()
        self._is_driven = self._is_polled = True
        return min(timeout_s, self._time_to_next_timer_s())

    def _drive_once(self, timeout_s: float) -> None:
        """Poll once, handle what comes, and leave the seat. Without the lock."""
        try:
            events = self._epoll.poll(timeout_s)
            with self.lock:
                self._is_polled = False
                self.undivided(lambda: self._handle(events))
        finally:
            self._leave_seat()
        self.run_deferred()

    def _leave_seat(self) -> None:
        """If this thread has it. Without the lock."""
        with self.lock:
            if self._is_driven and self._driver == threading.get_ident():
                self._is_driven = self._is_polled = False
                if self._sleepers:
                    self._changed.notify_all()

    def _handle(self, events: list[tuple[int, int]]) -> None:
        for fd, mask in events:
            if fd == self._wake_fd:
                if not self._is_closed:  # that all pollers must hear of
                    os.eventfd_read(self._wake_fd)
                continue
            handler = self._handlers.get(fd)
            if handler is not None:
                handler(mask)
        self._timers.run_due(time.monotonic())
        self._flush()

    # The helper thread

    def _help(self) -> None:
        # Polls a second epoll descriptor that becomes readable with the first one, so that it can
        # wait without the driver's seat: a caller that arrives meanwhile need not drive it away.
        with select.epoll() as watch:
            watch.register(self._epoll.fileno(), select.EPOLLIN)
            while True:
                with self.lock:
                    while self._callers_take_care():
                        self._helper_may_go_on.wait(HELPER_PATIENCE_S)
                    if self._is_closed:
                        return
                    timeout_s = self._time_to_next_timer_s()
                    self._helper_wakes_s = time.monotonic() + timeout_s
                watch.poll(timeout_s)
                with self.lock:
                    self._helper_wakes_s = 0.0
                    is_needed = self._take_free_seat()
                if is_needed:
                    self._drive_once(0.0)

    def _take_free_seat(self) -> bool:
        if self._is_closed or self._is_driven:
            return False
        self._take_seat(0.0)
        return True

    def _callers_take_care(self) -> bool:
        """Whether the helper is not needed at the moment."""
        if self._is_closed:
            return False
        if self._is_driven:
            return True
        recently = time.monotonic() - self._last_driven_s < HELPER_PATIENCE_S
        return recently and not self._under_way

    def _time_to_next_timer_s(self) -> float:
        due_s = self._timers.next_due_s()
        return POLL_SLICE_S if due_s is None else max(0.0, due_s - time.monotonic())

    # The end

    def close(self) -> None:
        """Stop the helper and release the descriptors of the loop itself. Safe to call twice."""
        with self.lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._helper_may_go_on.notify()
            self._changed.notify_all()
            self._wake_pollers()
        if threading.current_thread() is not self._helper:
            self._helper.join()
        with self.lock:
            # another thread's driver still reads the descriptors; this thread's own one notices
            while self._is_driven and self._driver != threading.get_ident():
                self._sleepers += 1
                self._changed.wait()
                self._sleepers -= 1
            self._release()

    def _release(self) -> None:
        self._epoll.close()
        os.close(self._wake_fd)
        self._handlers.clear()
        _LOOPS.discard(self)

    def abandon_in_child(self) -> None:
        """After a fork: let go of what belongs to the parent, without touching the connections."""
        self.lock = threading.Lock()
        self._is_closed = True
        for callback in self.on_fork:
            callback()
        self._release()


_LOOPS: weakref.WeakSet[EventLoop] = weakref.WeakSet()


def _abandon_all_in_child() -> None:
    # A child that kept its parent's connections open would hide the parent's death from the peers.
    for loop in list(_LOOPS):
        loop.abandon_in_child()


os.register_at_fork(after_in_child=_abandon_all_in_child)
