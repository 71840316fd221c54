"""Is this a signal's handler that runs in the middle of one of our operations?

A handler runs on the main thread, between any two steps. What it interrupted may hold locks and
have changed half of its state, and goes on only when the handler has returned.
"""

from __future__ import annotations

import sys
import threading
from types import FrameType

_PACKAGES = ("impl.gloo.", "impl.transport.")


def interrupts_an_operation(module: str) -> bool:
    """Whether there is a function of ours on the main thread's stack, below those of `module`.

    Looks only when asked, so operations pay nothing for it.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") == module:
        frame = frame.f_back
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith(_PACKAGES):
            return True
        frame = frame.f_back
    return False
