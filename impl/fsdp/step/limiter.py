"""Rate limiter of all-gathers (`limit_all_gathers`): a queue of the events of pending frees."""

from __future__ import annotations

from collections import deque

from impl.device import Event

# Computation of one unit and the gather of the next: two unsharded units in memory.
MAX_UNSHARDED_UNITS = 2


class FreeEventQueue:
    """Pending frees of unsharded parameters, oldest first.

    Without a limit the host would allocate for the gathers of many units before the device has got
    to freeing the first one, and memory would peak as if nothing were sharded.
    """

    def __init__(self) -> None:
        self._events: deque[Event] = deque()

    def enqueue(self, freed: Event) -> None:
        """Add `freed`, the event after which a unit's memory may be used again."""
        self._events.append(freed)

    def dequeue_if_needed(self) -> Event | None:
        """The event to wait for before the next gather, if too many frees are pending."""
        if len(self._events) >= MAX_UNSHARDED_UNITS:
            return self._events.popleft()
        return None
