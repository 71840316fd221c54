"""Parts of a schedule: buffer regions, steps (send, receive, accumulate, copy), traffic counts.

[Note: a schedule is a straight program]
A schedule lists, for one rank, the steps of a collective in program order. It means what it would
mean if every step were finished before the next one began. `Send` and `Receive` are nevertheless
only started where they stand: the executor lets them run in the background until a later step
touches their memory (see `executor.py`). A schedule therefore contains no waits; how much is in
flight at once follows from the memory that its steps name. A ring that receives into two
alternating halves of its scratch space has two segments in flight. Only messages without content
need a `Fence` to put them in order.

A schedule must not rely on messages being buffered on the way: a send may not end before its
receiver has started to receive. So a `Receive` stands before the `Send` of the same round, and no
receive may land in memory that a pending send of a whole ring of ranks still occupies.

[Note: offsets are bytes]
A region is a range of bytes of one buffer. Bytes, not elements, because Gloo halves a block in
the middle of an element when it gathers. Regions that are combined always hold whole elements.

Messages between two ranks arrive in the order in which they were sent, so a step needs no label:
the n-th `Receive(source=s)` of rank r takes what the n-th `Send(to=r)` of rank s sent, and their
sizes agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum


class Buffer(IntEnum):
    """The memory of one rank during one collective."""

    INPUT = 0  # read only
    OUTPUT = 1  # the result; an operation that works in place starts with its input here
    SCRATCH = 2  # private to the collective, undefined at its start


@dataclass(frozen=True, slots=True)
class Region:
    """Bytes `start` to `start + nbytes` of a buffer; empty regions touch nothing."""

    buffer: Buffer
    start: int
    nbytes: int

    @property
    def stop(self) -> int:
        return self.start + self.nbytes

    def overlaps(self, other: Region) -> bool:
        # Comparing the inner bounds makes this false when either region is empty.
        return self.buffer is other.buffer and (
            max(self.start, other.start) < min(self.stop, other.stop)
        )


@dataclass(frozen=True, slots=True)
class Send:
    to: int
    region: Region


@dataclass(frozen=True, slots=True)
class Receive:
    source: int
    region: Region


@dataclass(frozen=True, slots=True)
class Accumulate:
    """into = op(into, other). The order of the operands decides which NaN survives."""

    into: Region
    other: Region


@dataclass(frozen=True, slots=True)
class Fold:
    """into = parts[0] op parts[1] op ..., from left to right; `into` may be the first part.

    Unlike a chain of `Accumulate`, this rounds narrow floating-point types once, at the end.
    """

    into: Region
    parts: tuple[Region, ...]


@dataclass(frozen=True, slots=True)
class Copy:
    into: Region
    source: Region


@dataclass(frozen=True, slots=True)
class Fence:
    """Everything started so far has ended when the next step begins."""


Step = Send | Receive | Accumulate | Fold | Copy | Fence


@dataclass(frozen=True, slots=True)
class Schedule:
    """One rank's part in one collective. `steps` may be iterated any number of times."""

    steps: tuple[Step, ...]
    scratch_nbytes: int = 0


def schedule(steps: Callable[[], Iterator[Step]], scratch_nbytes: int = 0) -> Schedule:
    """A schedule from the generator function that writes it down."""
    return Schedule(tuple(steps()), scratch_nbytes)


NOTHING = Schedule(())


def output(start: int, nbytes: int) -> Region:
    return Region(Buffer.OUTPUT, start, nbytes)


def input_(start: int, nbytes: int) -> Region:
    return Region(Buffer.INPUT, start, nbytes)


def scratch(start: int, nbytes: int) -> Region:
    return Region(Buffer.SCRATCH, start, nbytes)


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one rank puts on the network, and what it computes, when it follows a schedule."""

    messages: int
    sent_nbytes: int
    combined_nbytes: int


def traffic(plan: Schedule) -> Traffic:
    """Count a schedule's messages and bytes: the truth that the formulas of `cost.py` must meet."""
    sends = [step.region.nbytes for step in plan.steps if isinstance(step, Send)]
    combined = 0
    for step in plan.steps:
        if isinstance(step, Accumulate):
            combined += step.into.nbytes
        elif isinstance(step, Fold):
            combined += (len(step.parts) - 1) * step.into.nbytes
    return Traffic(len(sends), sum(sends), combined)
