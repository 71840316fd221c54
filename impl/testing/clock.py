"""Simulated clock and timers: time jumps to the next call when nothing else can happen."""

from __future__ import annotations

from collections.abc import Callable

from impl.transport.sockets.loop import Timer, Timers


class SimulatedClock:
    """Time in seconds from 0, and calls that are to happen at certain times."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._timers = Timers()

    def now(self) -> float:
        return self._now_s

    def call_at(self, due_s: float, callback: Callable[[], None]) -> Timer:
        return self._timers.add(max(due_s, self._now_s), callback)

    def jump(self) -> bool:
        """Go to the next call and make it, and all of that moment. False if there is none."""
        due_s = self._timers.next_due_s()
        if due_s is None:
            return False
        self._now_s = due_s
        self._timers.run_due(due_s)
        return True
