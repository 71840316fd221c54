"""Marks background threads, which sleep instead of spinning while they wait.

A thread that its user waits for may spin: the sooner it goes on the better. A thread that works
behind the back of a computation must not: it would take the processor from the very computation
that it is meant to overlap, in this rank or in another one, and a scheduler that sees it sleep lets
it run at once when it is woken.
"""

from __future__ import annotations

import threading


class _Role(threading.local):
    is_background = False


_role = _Role()


def work_in_background() -> None:
    """Called once by a thread that is rarely waited for."""
    _role.is_background = True


def is_background() -> bool:
    """Whether the calling thread should sleep rather than spin."""
    return _role.is_background
