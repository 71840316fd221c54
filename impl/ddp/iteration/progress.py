"""State machine of the reducer: phases, events, and the table of transitions.

    IDLE        between passes: hooks have no effect
    EXPECTING   forward is over; no gradient has been marked yet
    REDUCING    backward runs, or it ended before all buckets were reduced: each forward raises
    OVERTAKEN   backward ended before all buckets were reduced, or another forward pass came
                before that: each forward raises, and the next hook marks the unused anew

A backward pass that reduces everything leads back to IDLE, and so does a reset. EXPECTING is also
left when buckets are rebuilt or hooks are renewed: if the backward pass of an earlier forward pass
comes after all, `backward_begins` expects it anew.
"""

from __future__ import annotations

from enum import Enum, auto

from impl.state_machine import StateMachine


class ReducerPhase(Enum):
    IDLE = auto()
    EXPECTING = auto()
    REDUCING = auto()
    OVERTAKEN = auto()


class ReducerEvent(Enum):
    """What the reducer does or notices.

    FORWARD_ENDED: a forward pass is over whose gradients are to be averaged.
    FIRST_MARKED: a gradient of this backward pass is marked as ready for the first time.
    FOUND_INCOMPLETE: hooks have fired, but backward is already over.
    DELIVERED: all buckets are reduced.
    DROPPED: what was expected is no longer expected.
    """

    FORWARD_ENDED = auto()
    FIRST_MARKED = auto()
    FOUND_INCOMPLETE = auto()
    DELIVERED = auto()
    DROPPED = auto()


TRANSITIONS = {
    (ReducerPhase.IDLE, ReducerEvent.FORWARD_ENDED): ReducerPhase.EXPECTING,
    (ReducerPhase.EXPECTING, ReducerEvent.FORWARD_ENDED): ReducerPhase.EXPECTING,
    (ReducerPhase.REDUCING, ReducerEvent.FORWARD_ENDED): ReducerPhase.OVERTAKEN,
    (ReducerPhase.OVERTAKEN, ReducerEvent.FORWARD_ENDED): ReducerPhase.OVERTAKEN,
    (ReducerPhase.EXPECTING, ReducerEvent.FIRST_MARKED): ReducerPhase.REDUCING,
    (ReducerPhase.OVERTAKEN, ReducerEvent.FIRST_MARKED): ReducerPhase.REDUCING,
    (ReducerPhase.EXPECTING, ReducerEvent.FOUND_INCOMPLETE): ReducerPhase.OVERTAKEN,
    (ReducerPhase.REDUCING, ReducerEvent.FOUND_INCOMPLETE): ReducerPhase.REDUCING,
    (ReducerPhase.OVERTAKEN, ReducerEvent.FOUND_INCOMPLETE): ReducerPhase.OVERTAKEN,
    (ReducerPhase.REDUCING, ReducerEvent.DELIVERED): ReducerPhase.IDLE,
    (ReducerPhase.OVERTAKEN, ReducerEvent.DELIVERED): ReducerPhase.IDLE,
    **{(phase, ReducerEvent.DROPPED): ReducerPhase.IDLE for phase in ReducerPhase},
}


class ReducerProgress(StateMachine[ReducerPhase, ReducerEvent]):
    """The phase of one reducer."""

    def __init__(self) -> None:
        super().__init__(ReducerPhase.IDLE, TRANSITIONS)

    @property
    def is_expecting(self) -> bool:
        """Whether hooks belong to a synchronised backward pass."""
        return self.phase is not ReducerPhase.IDLE

    @property
    def is_unfinished(self) -> bool:
        """Whether gradients were marked, and not all buckets were reduced."""
        return self.phase in (ReducerPhase.REDUCING, ReducerPhase.OVERTAKEN)

    @property
    def has_marked(self) -> bool:
        """Whether this pass has marked its first gradient."""
        return self.phase is ReducerPhase.REDUCING
