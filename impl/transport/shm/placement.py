"""Moves a rank to a less crowded processor when several ranks of the group run on its own.

[Note: crowded processors] A scheduler that looks for the cheapest place for a woken process may put
two ranks on one processor and leave another one idle. As each calls `sched_yield` in turn, its load
balancer does not notice for some time. A collective then takes the sum of the ranks' times instead
of the longest; balancing the load comes round to it after some 30 ms. So a rank writes down where
it runs, every few rounds and whenever it has to wait, and one that finds more ranks on its
processor than need be, and still finds them there a little later (what the others wrote down may be
old), goes to the one with the fewest. Its affinity is narrowed for that moment only: nothing is
pinned, and the scheduler may move it at any time.
"""

from __future__ import annotations

import ctypes
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence

_LOOKS_EVERY_S = 0.002
_CONFIRMS_AFTER_S = 0.0005
# How long a rank stays after it has moved. A scheduler that puts it back soon knows of other work,
# and the next time is twice as long: that is not fought over.
_STAYS_S, _STAYS_MAX_S = 0.01, 10.0
_SOON = 3  # times as long as it stays

current_processor: Callable[[], int] = ctypes.CDLL(None).sched_getcpu


def better_processor(
    places: Sequence[int | None], position: int, allowed: Collection[int]
) -> int | None:
    """Where the rank at `position` should go; None if it is well placed or another one should go.

    places: the processor of each rank, None where it is not known; this rank's own is.
    allowed: the processors on which this rank may run.
    """
    here = places[position]
    ranks = Counter(places)
    last = max(p for p, place in enumerate(places) if place == here)
    if last != position or not allowed:
        return None
    there = min(allowed, key=lambda processor: (ranks[processor], processor))
    return there if ranks[there] + 2 <= ranks[here] else None


class ProcessorPlacement:
    """One rank's part in keeping the ranks apart."""

    def __init__(self, u32: memoryview, indices: Sequence[int], position: int) -> None:
        """indices: by position, the word in which a rank writes its processor's number plus 1."""
        self._u32 = u32
        self._indices = tuple(indices)
        self._position = position
        self._own = self._indices[position]
        self._not_before_s = 0.0
        self._crowded_s = -math.inf  # when more ranks than need be were seen, and nothing was done
        self._moved_s = -math.inf
        self._stays_s = _STAYS_S

    def note(self) -> int:
        """Record the processor on which this rank runs; returns the recorded value."""
        here = self._u32[self._own] = current_processor() + 1
        return here

    def waits_for(self, position: int) -> None:
        """This rank has to wait; it moves if it shares its processor with the other one."""
        here = self.note()
        if here and self._u32[self._indices[position]] == here:
            self._spread()

    def _spread(self) -> None:
        now_s = time.monotonic()
        if now_s < self._not_before_s:
            return
        places = [self._u32[index] - 1 if self._u32[index] else None for index in self._indices]
        allowed = os.sched_getaffinity(0)
        there = better_processor(places, self._position, allowed)
        if there is None:
            self._crowded_s = -math.inf
            self._not_before_s = now_s + _LOOKS_EVERY_S
            return
        if now_s > self._crowded_s + _STAYS_S:
            self._crowded_s = now_s
            self._not_before_s = now_s + _CONFIRMS_AFTER_S
            return
        self._crowded_s = -math.inf
        was_put_back = now_s < self._moved_s + _SOON * self._stays_s
        self._stays_s = min(2 * self._stays_s, _STAYS_MAX_S) if was_put_back else _STAYS_S
        self._moved_s = now_s
        self._not_before_s = now_s + self._stays_s
        try:
            try:
                os.sched_setaffinity(0, {there})
            finally:  # whatever a signal's handler raises
                os.sched_setaffinity(0, allowed)
        except OSError:  # a sandbox may forbid it
            self._not_before_s = math.inf
            return
        self._u32[self._own] = there + 1
