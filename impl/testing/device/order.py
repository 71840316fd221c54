"""Vector clocks of host threads and streams, and detection of unordered accesses to memory (races).

An *actor* is a host thread or a stream: what it does is ordered. Each of its steps has a tick. A
clock says, for every actor, up to which tick everything has happened before. Whoever waits for an
event takes in the clock that the event was recorded with.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

Clock = dict[int, int]  # actor -> tick

_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class ActorStep:
    """One step of an actor. what: words for a report."""

    actor: int
    tick: int
    what: str

    def is_before(self, clock: Clock) -> bool:
        """Whether it has happened before whatever has this clock."""
        return clock.get(self.actor, 0) >= self.tick


class Actor:
    """A host thread or a stream."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.number = next(_numbers)
        self.clock: Clock = {self.number: 0}

    def step(self, what: str) -> ActorStep:
        """The next thing that it does."""
        tick = self.clock[self.number] + 1
        self.clock[self.number] = tick
        return ActorStep(self.number, tick, f"{what} on {self.name}")

    def learn(self, clock: Clock) -> None:
        """What has this clock happened before all further steps."""
        for actor, tick in clock.items():
            if self.clock.get(actor, 0) < tick:
                self.clock[actor] = tick


@dataclass(frozen=True, slots=True)
class Access:
    """A step that reads or writes the bytes [start, stop) of a memory."""

    moment: ActorStep
    start: int
    stop: int
    writes: bool

    def conflicts_with(self, other: Access) -> bool:
        """Whether the two must be ordered."""
        return (self.writes or other.writes) and (
            self.start < other.stop and other.start < self.stop
        )

    def makes_moot(self, other: Access) -> bool:
        """Whether `other`, which came before, need not be remembered: who is ordered after this one
        is ordered after that one."""
        return (self.writes or not other.writes) and (
            self.start <= other.start and other.stop <= self.stop
        )


@dataclass(slots=True)
class History:
    """The accesses of one memory that a later one may have to be ordered after."""

    accesses: list[Access] = field(default_factory=list)

    def add(self, access: Access, clock: Clock) -> list[Access]:
        """Note an access by an actor with this clock; those that it is not ordered after."""
        races = []
        kept = []
        for earlier in self.accesses:
            if earlier.moment.is_before(clock):
                if not access.makes_moot(earlier):
                    kept.append(earlier)
                continue
            kept.append(earlier)
            if access.conflicts_with(earlier):
                races.append(earlier)
        kept.append(access)
        self.accesses = kept
        return races
