"""Execution of a schedule: starts sends and receives, reduces, copies, and waits where it must.

[Note: when the executor waits]
Transfers are started in program order and end in the background. Before a step touches memory, the
executor waits for the transfers that use the same memory in a way that the step could notice:

    pending \\ step    reads the region     writes the region
    send              may go ahead         waits
    receive           waits                waits

The executor is a generator: it yields the transfer that must end before it can go on, and what
drives it decides how to wait. A communicator over sockets waits in its event loop; the simulation
runs another rank meanwhile. The generator ends when all transfers have ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from impl.schedules.steps import (
    Accumulate,
    Copy,
    Fence,
    Fold,
    Receive,
    Region,
    Schedule,
    Send,
    Step,
)


class Pending(Protocol):
    """What a collective waits for: a send or receive under way, for instance.

    It may end at any moment, but it never becomes undone.
    """

    @property
    def done(self) -> bool: ...


class Port(Protocol):
    """Where the messages of a collective go: our n-th send to a rank meets its n-th receive."""

    def send(self, to: int, data: memoryview) -> Pending: ...

    def receive(self, source: int, into: memoryview) -> Pending: ...

    def flush(self) -> None:
        """Send what is held back to be sent with more: a long computation follows."""


class RankMemory(Protocol):
    """The buffers of one rank."""

    def view(self, region: Region) -> memoryview:
        """The region's bytes, writable unless it lies in INPUT."""

    def combine(self, into: Region, other: Region) -> None: ...

    def fold(self, into: Region, parts: Sequence[Region]) -> None: ...

    def copy(self, into: Region, source: Region) -> None: ...


def execute(plan: Schedule, memory: RankMemory, port: Port) -> Iterator[Pending]:
    """Carry out `plan`. Yields a transfer whenever nothing can be done until it ends."""
    sends: list[tuple[Pending, Region]] = []
    receives: list[tuple[Pending, Region]] = []
    for step in plan.steps:
        if isinstance(step, Fence):
            yield from _until_done(sends)
            yield from _until_done(receives)
            continue
        if sends or receives:
            yield from _until_safe(step, sends, receives)
        if isinstance(step, Receive):
            transfer = port.receive(step.source, memory.view(step.region))
            receives.append((transfer, step.region))
        elif isinstance(step, Send):
            transfer = port.send(step.to, memory.view(step.region))
            if not transfer.done:
                sends.append((transfer, step.region))
        elif isinstance(step, Accumulate):
            port.flush()
            memory.combine(step.into, step.other)
        elif isinstance(step, Fold):
            port.flush()
            memory.fold(step.into, step.parts)
        else:
            memory.copy(step.into, step.source)
    yield from _until_done(sends)
    yield from _until_done(receives)


def _until_safe(
    step: Step,
    sends: list[tuple[Pending, Region]],
    receives: list[tuple[Pending, Region]],
) -> Iterator[Pending]:
    """Wait for the transfers that `step` must not overtake, and forget those that have ended."""
    touched, written = _touches(step)
    if receives:
        for transfer, region in receives:
            if any(region.overlaps(other) for other in touched):
                while not transfer.done:
                    yield transfer
        receives[:] = [pending for pending in receives if not pending[0].done]
    if sends and written is not None:
        for transfer, region in sends:
            if region.overlaps(written):
                while not transfer.done:
                    yield transfer
        sends[:] = [pending for pending in sends if not pending[0].done]


def _touches(step: Step) -> tuple[tuple[Region, ...], Region | None]:
    """The regions that a step reads or writes, and the one that it writes."""
    match step:
        case Send(region=region):
            return (region,), None
        case Receive(region=region):
            return (region,), region
        case Accumulate(into=into, other=other):
            return (into, other), into
        case Fold(into=into, parts=parts):
            return (into, *parts), into
        case Copy(into=into, source=source):
            return (into, source), into
        case Fence():
            return (), None


def _until_done(pending: list[tuple[Pending, Region]]) -> Iterator[Pending]:
    for transfer, _ in pending:
        while not transfer.done:
            yield transfer
    pending.clear()
