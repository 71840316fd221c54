"""Simulation of a single schedule: all ranks in one thread, whole messages, numpy buffers.

This is the quickest check of a schedule: no frames, no sockets, no torch. A `random.Random`
decides which rank runs next and which message arrives next. The network is as unhelpful as a
schedule must be able to bear: a send ends only when its message has been received (*rendezvous*),
or, for half of the seeds of a test, as soon as it was started.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

from impl.schedules.executor import Pending, execute
from impl.schedules.steps import Buffer, Region, Schedule

Array = npt.NDArray[Any]


class StuckError(AssertionError):
    """No rank can go on, and no message is under way."""


@dataclass(eq=False, slots=True)
class SimulatedMessage:
    """One end of a message; both ends are matched when they meet."""

    rank: int
    peer: int
    data: memoryview
    done: bool = False


@dataclass(slots=True)
class SimulatedMailbox:
    """The messages under way, by (sender, receiver), each in order."""

    buffered: bool
    sent: dict[tuple[int, int], deque[SimulatedMessage]] = field(default_factory=dict)
    wanted: dict[tuple[int, int], deque[SimulatedMessage]] = field(default_factory=dict)

    def deliverable(self) -> list[tuple[int, int]]:
        return [way for way, queue in self.sent.items() if queue and self.wanted.get(way)]

    def deliver(self, way: tuple[int, int]) -> None:
        message, receive = self.sent[way].popleft(), self.wanted[way].popleft()
        if len(message.data) != len(receive.data):
            raise AssertionError(
                f"rank {way[0]} sends {len(message.data)} bytes to rank {way[1]},"
                f" which wants {len(receive.data)}"
            )
        receive.data[:] = message.data
        message.done = receive.done = True


@dataclass(slots=True)
class MailboxPort:
    """A rank's side of the mailbox."""

    rank: int
    box: SimulatedMailbox

    def send(self, to: int, data: memoryview) -> Pending:
        assert to != self.rank, "a rank does not write to itself"
        # A buffered message is copied: its region may change while it waits.
        content = memoryview(bytes(data)) if self.box.buffered else data
        message = SimulatedMessage(self.rank, to, content, done=self.box.buffered)
        self.box.sent.setdefault((self.rank, to), deque()).append(message)
        return message

    def receive(self, source: int, into: memoryview) -> Pending:
        assert source != self.rank, "a rank does not wait for itself"
        message = SimulatedMessage(self.rank, source, into)
        self.box.wanted.setdefault((source, self.rank), deque()).append(message)
        return message

    def flush(self) -> None: ...


@dataclass(slots=True)
class ArrayMemory:
    """A rank's buffers as flat numpy arrays; scratch is filled with rubbish of the same dtype."""

    output: Array
    input: Array
    scratch: Array
    combine_arrays: Callable[[Array, Array], Array]

    def _array(self, region: Region) -> Array:
        array = {
            Buffer.INPUT: self.input,
            Buffer.OUTPUT: self.output,
            Buffer.SCRATCH: self.scratch,
        }[region.buffer]
        content = array.view(np.uint8)[region.start : region.stop]
        assert content.nbytes == region.nbytes, f"{region} lies outside of {array.nbytes} bytes"
        return content

    def view(self, region: Region) -> memoryview:
        return self._array(region).data

    def combine(self, into: Region, other: Region) -> None:
        accumulator = self._array(into).view(self.output.dtype)
        accumulator[:] = self.combine_arrays(
            accumulator, self._array(other).view(self.output.dtype)
        )

    def fold(self, into: Region, parts: Sequence[Region]) -> None:
        arrays = [self._array(part).view(self.output.dtype) for part in parts]
        self._array(into).view(self.output.dtype)[:] = reduce(self.combine_arrays, arrays)

    def copy(self, into: Region, source: Region) -> None:
        self._array(into)[:] = self._array(source)


@dataclass(frozen=True, slots=True)
class RankBuffers:
    """What one rank brings to a collective. `output` is changed in place."""

    output: Array
    input: Array


def run_on_all_ranks(
    plans: Sequence[Schedule],
    buffers: Sequence[RankBuffers],
    *,
    seed: int = 0,
    combine: Callable[[Array, Array], Array] = np.add,
) -> None:
    """Carry out `plans[r]` for every rank r, in an order that `seed` decides.

    Raises `StuckError` on a deadlock and AssertionError when a message has no receiver, sizes
    differ or a rank reaches outside of its buffers.
    """
    random = Random(seed)
    box = SimulatedMailbox(buffered=random.random() < 0.5)
    running = {}
    waiting_for: dict[int, Pending | None] = {}
    for rank, (plan, own) in enumerate(zip(plans, buffers, strict=True)):
        rubbish = np.full(plan.scratch_nbytes, 0xA5, np.uint8)
        memory = ArrayMemory(own.output, own.input, rubbish, combine)
        running[rank] = execute(plan, memory, MailboxPort(rank, box))
        waiting_for[rank] = None
    while running:
        ready = [r for r in running if (w := waiting_for[r]) is None or w.done]
        ways = box.deliverable()
        if not ready and not ways:
            raise StuckError(f"ranks {sorted(running)} wait for messages that are never sent")
        if ready and (not ways or random.random() < 0.5):
            rank = random.choice(ready)
            waiting_for[rank] = next(running[rank], None)
            if waiting_for[rank] is None:
                del running[rank]
        else:
            box.deliver(random.choice(ways))
    left = {way: len(queue) for way, queue in box.sent.items() if queue}
    assert not left, f"messages that were never received: {left}"
