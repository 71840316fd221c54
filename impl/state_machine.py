"""A state machine that is a table: (phase, event) -> phase.

The table is both the documentation and what runs. An event that the table does not list for the
current phase is a defect of the caller; the error names both.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Generic, TypeVar

Phase = TypeVar("Phase", bound=Enum)
Event = TypeVar("Event", bound=Enum)


class IllegalTransition(AssertionError):
    """The table has no transition for this event in this phase."""


class StateMachine(Generic[Phase, Event]):
    """One thing that is in one phase at a time."""

    def __init__(self, phase: Phase, transitions: Mapping[tuple[Phase, Event], Phase]) -> None:
        self.phase = phase
        self._transitions = transitions

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.phase.name})"

    def on(self, event: Event) -> None:
        """Go to the phase that follows. Raises IllegalTransition if there is none."""
        try:
            self.phase = self._transitions[self.phase, event]
        except KeyError:
            raise IllegalTransition(f"{event.name} while {self.phase.name}") from None
