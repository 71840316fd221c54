"""Raises, like a signal handler, at each point of the transports' code where Python may run one."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import impl

# what a transport executes
_TRACED = tuple(f"{Path(impl.__path__[0]) / package}/" for package in ("transport", "schedules"))


class Interrupted(Exception):
    """What a handler raises."""


class RaisesAt:
    """A context in which transports are broken off at the `number`-th place where they can be.

    Python runs handlers where a function begins, and when a built-in one has returned.
    """

    def __init__(self, number: int) -> None:
        self._left = number

    def __enter__(self) -> None:
        sys.setprofile(self._look)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _look(self, frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        if event not in ("call", "c_return") or not code.co_filename.startswith(_TRACED):
            return
        # what is raised in a generator that is being closed goes nowhere
        if not code.co_flags & inspect.CO_GENERATOR:
            self._left -= 1
            if self._left == 0:
                raise Interrupted


def everywhere(breaks_off: Callable[[int], bool]) -> None:
    """Call `breaks_off(number)` for 1, 2, ... until there was no such place to break off at."""
    number = 1
    while breaks_off(number):
        number += 1
    assert number > 1, "nothing of the transports ran"
