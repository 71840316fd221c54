"""Execution order of kernels on simulated streams: eager, lazy, random, or side streams first.

Within a stream in order; across streams, in any order that the waits permit. A `KernelSchedule`
decides: as soon as possible, as late as possible, or by lot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from random import Random


class Kernel:
    """Work on a stream. after: what must have been executed before it, besides its stream's."""

    __slots__ = ("after", "is_done", "on_done", "run")

    def __init__(self, run: Callable[[], None] | None, after: Sequence[Kernel]) -> None:
        self.run = run
        self.is_done = False
        self.after = [kernel for kernel in after if not kernel.is_done]
        self.on_done: list[Callable[[], None]] = []

    def execute(self) -> None:
        """Once, when everything before it is done."""
        if self.run is not None:
            self.run()
        self.run, self.is_done = None, True
        self.after.clear()
        for callback in self.on_done:
            callback()
        self.on_done.clear()


class KernelSchedule:
    """Executes nothing before it is waited for, and then no more than is needed."""

    def __init__(self) -> None:
        self._queues: dict[Hashable, deque[Kernel]] = {}

    def put(self, stream: Hashable, kernel: Kernel) -> None:
        """Put a kernel on a stream, behind what is there."""
        self._queues.setdefault(stream, deque()).append(kernel)

    def finish(self, kernel: Kernel) -> None:
        """Execute until `kernel` is done."""
        while not kernel.is_done:
            stream = self._choose(self._ready(), kernel)
            self._queues[stream].popleft().execute()

    def finish_all(self) -> None:
        """Execute everything."""
        for queue in list(self._queues.values()):
            if queue:
                self.finish(queue[-1])

    def streams(self) -> list[Hashable]:
        """Streams that anything was put on."""
        return list(self._queues)

    def _ready(self) -> list[Hashable]:
        """Streams whose first kernel may be executed."""
        return [
            stream
            for stream, queue in self._queues.items()
            if queue and all(before.is_done for before in queue[0].after)
        ]

    def _choose(self, ready: list[Hashable], wanted: Kernel) -> Hashable:
        needed = self._needed_for(wanted)
        return next(stream for stream in ready if stream in needed)

    def _needed_for(self, wanted: Kernel) -> set[Hashable]:
        """Streams that something must still be executed on."""
        home = {id(k): (s, i) for s, q in self._queues.items() for i, k in enumerate(q)}
        needed: set[Hashable] = set()
        seen: set[int] = set()
        frontier = [wanted]
        while frontier:
            kernel = frontier.pop()
            if kernel.is_done or id(kernel) in seen:
                continue
            seen.add(id(kernel))
            frontier += kernel.after
            stream, position = home[id(kernel)]
            needed.add(stream)
            if position:
                frontier.append(self._queues[stream][position - 1])
        return needed


class Eager(KernelSchedule):
    """Executes everything at once, as a device does that is faster than the host."""

    def put(self, stream: Hashable, kernel: Kernel) -> None:
        super().put(stream, kernel)
        self.finish(kernel)


class Drawn(KernelSchedule):
    """Executes what lots decide, when lots decide."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = Random(seed)
        self._diligence = self._random.choice((0.0, 0.2, 0.5, 0.9))

    def put(self, stream: Hashable, kernel: Kernel) -> None:
        super().put(stream, kernel)
        while self._random.random() < self._diligence and (ready := self._ready()):
            self._queues[self._random.choice(ready)].popleft().execute()

    def _choose(self, ready: list[Hashable], wanted: Kernel) -> Hashable:
        return self._random.choice(ready)


class SideStreamsFirst(KernelSchedule):
    """Executes side streams as soon as it can, and the first stream as late as it can.

    The most unkind order for a caller that is not waited for, and that does not wait.
    """

    def __init__(self) -> None:
        super().__init__()
        self._main: Hashable = None

    def put(self, stream: Hashable, kernel: Kernel) -> None:
        super().put(stream, kernel)
        if self._main is None:
            self._main = stream
        while side := [other for other in self._ready() if other is not self._main]:
            self._queues[side[0]].popleft().execute()
