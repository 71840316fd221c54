"""Re-entrancy: detects from the call stack that a signal handler or `__del__` has interrupted an
operation, and runs jobs on another thread.

A signal's handler runs on the main thread, between any two steps. What it interrupted may hold
locks and have changed half of its state, and goes on only when the handler has returned. The same
is true of a `__del__` or a finalizer when the garbage collector frees something: on any thread.
"""

from __future__ import annotations

import _thread
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType

_PACKAGES = ("impl.gloo.", "impl.transport.")


def interrupts_an_operation(module: str, calls_users: CodeType) -> bool:
    """Whether there is a function of ours on this thread's stack, below those of `module`.

    Not if the uppermost is `calls_users`, which calls functions of users where nothing is held.
    Looks only when asked, so operations pay nothing for it.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") == module:
        frame = frame.f_back
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith(_PACKAGES):
            return frame.f_code is not calls_users
        frame = frame.f_back
    return False


def run_beside(name: str, job: Callable[[], object]) -> None:
    """Call `job` on a thread of its own, and return at once, wherever this is called.

    It may be in the middle of Python's own code that starts or lists threads, and whoever starts a
    `Thread` waits for the lock of that: so this, too, is done on another thread.
    """
    thread = threading.Thread(target=job, name=name, daemon=False)
    _thread.start_new_thread(thread.start, ())
