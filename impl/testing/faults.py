"""What may go wrong in a simulated group, and when: after so many events of a rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Kill:
    """The process of a rank ends after it has handled so many events. The kernel closes for it."""

    rank: int
    after_events: int


@dataclass(frozen=True, slots=True)
class Cut:
    """The connection between two living ranks breaks, once the first has handled so many events."""

    rank: int
    other: int
    after_events: int


@dataclass(frozen=True, slots=True)
class Freeze:
    """A rank does nothing any more, but its connections stay."""

    rank: int
    after_events: int


@dataclass(frozen=True, slots=True)
class Pause:
    """A rank does nothing for so many seconds, and then goes on."""

    rank: int
    after_events: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Hold:
    """What is sent between two sets of ranks arrives so many seconds late: a partition that heals,
    or one slow connection. It begins once `rank` has handled so many events."""

    rank: int
    after_events: int
    some: tuple[int, ...]
    others: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Abort:
    """A rank aborts its group."""

    rank: int
    after_events: int


Fault: TypeAlias = "Kill | Cut | Freeze | Pause | Hold | Abort"
