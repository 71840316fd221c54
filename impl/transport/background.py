"""Background threads: their start, and the mark by which they sleep instead of spinning.

A thread that its user waits for may spin: the sooner it goes on the better. A thread that works
behind the back of a computation must not: it would take the processor from the very computation
that it is meant to overlap, in this rank or in another one, and a scheduler that sees it sleep lets
it run at once when it is woken.
"""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable
from typing import Any


class BackgroundThread(threading.Thread):
    """A daemon thread that is not lost if the handler of a signal raises while it starts.

    `threading.Thread.start` does not bear that: the new thread may end before it runs, with a
    KeyError (CPython 3.11). Only the main thread runs handlers, so another one calls it.
    """

    def __init__(self, target: Callable[..., object], *args: Any, name: str | None = None) -> None:
        super().__init__(target=target, args=args, name=name, daemon=True)
        self._start_is_over = False
        # A bare lock: what threading makes of it does not bear a handler that raises either.
        self._gate = _thread.allocate_lock()
        self._gate.acquire()
        self._why_not_started: BaseException | None = None

    def start(self) -> None:
        """Start it. An exception of a signal's handler is raised once the thread runs.

        Raises RuntimeError if the system allows no more threads.
        """
        interruption: BaseException | None = None
        _thread.start_new_thread(self._start_here, ())
        while not self._start_is_over:
            try:
                self._gate.acquire()
            except BaseException as error:
                interruption = error
        why = interruption or self._why_not_started
        if why is not None:
            raise why

    def _start_here(self) -> None:
        try:
            super().start()
        except BaseException as error:
            self._why_not_started = error
        self._start_is_over = True
        self._gate.release()


class _Role(threading.local):
    is_background = False


_role = _Role()


def work_in_background() -> None:
    """Called once by a thread that is rarely waited for."""
    _role.is_background = True


def is_background() -> bool:
    """Whether the calling thread should sleep rather than spin."""
    return _role.is_background
