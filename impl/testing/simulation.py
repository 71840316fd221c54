"""Simulation of a whole group in one process, with faults of ranks and links, decided by one seed.

Every rank runs the real thing, from the schedules through the executor and the exchange to the
frames; only sockets, threads and time are replaced. A rank is a generator: it yields while it
waits. One seed decides which rank runs next, how late bytes are and in which portions they come,
so a failure can be repeated as often as it takes to understand it.

    def program(me):
        x = torch.full((5,), float(me.rank))
        yield from me.all_reduce(x, SUM)
        return x

    outcomes = Simulation(world_size=3, seed=7).run(program)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, TypeAlias

from impl.testing.clock import SimulatedClock
from impl.testing.faults import Abort, Cut, Fault, Freeze, Hold, Kill, Pause
from impl.testing.network import PipeEnd, Weather, connection
from impl.testing.simulated_rank import Program, SimulatedLoop, SimulatedRank, Wait
from impl.transport.messages.hub import Link
from impl.transport.sockets.gloo_group import GlooGroup
from impl.transport.sockets.loop import Timer
from impl.transport.sockets.tcp_group import TcpGroup


@dataclass(frozen=True, slots=True)
class Returned:
    value: Any


@dataclass(frozen=True, slots=True)
class Raised:
    error: Exception
    at_s: float  # simulated time


@dataclass(frozen=True, slots=True)
class Killed:
    """A fault ended this rank."""


Outcome: TypeAlias = "Returned | Raised | Killed"


class Stuck(AssertionError):
    """No rank can go on, and nothing is under way."""


class FaultNeverFired(AssertionError):
    """A simulation ended before one of its faults was due."""


@dataclass(slots=True, eq=False)
class _Process:
    """A rank as the scheduler sees it."""

    me: SimulatedRank
    program: Program | None
    wait: Wait | None = None
    timer: Timer | None = None
    is_late: bool = False
    is_started: bool = False
    is_frozen: bool = False
    is_gone: bool = False  # it will never go on
    missed: list[Callable[[], None]] = field(default_factory=list)  # while it was frozen
    events: int = 0
    outcome: Outcome | None = None


class Simulation:
    """See the module. One simulation runs one program."""

    def __init__(
        self,
        world_size: int,
        seed: int,
        *,
        mode: str = "tcp",
        weather: Weather | None = None,
        faults: Sequence[Fault] = (),
        device_count: int = 1,
    ) -> None:
        self.clock = SimulatedClock()
        self.random = Random(seed)
        self.fired: dict[Fault, float] = {}  # simulated time
        self._world_size, self._mode, self._device_count = world_size, mode, device_count
        self._weather = weather or Weather()
        self._ready: list[Callable[[], None]] = []  # events that may happen now, in any order
        self._faults: list[Fault] = []
        self.regroup()
        self._faults += faults

    def regroup(self) -> None:
        """A new group of new ranks, without faults. What the ones before have left under way goes
        on, so that they would notice what reaches them from another group."""
        self._faults.clear()
        kinds: dict[str, type[TcpGroup] | type[GlooGroup]] = {"tcp": TcpGroup, "gloo": GlooGroup}
        self._streams: dict[tuple[int, int], list[PipeEnd]] = {}
        self._processes: list[_Process] = []
        for rank in range(self._world_size):
            loop = SimulatedLoop(self.clock)
            group = kinds[self._mode](rank, self._world_size, "simulated", self._device_count, loop)
            process = _Process(SimulatedRank(group, self.clock), None)
            loop.on_timer = partial(self._handle_timer, process)
            self._processes.append(process)
        for device in range(self._device_count):
            for rank in range(self._world_size):
                for other in range(rank):
                    self._connect(rank, other, device)

    def _connect(self, rank: int, other: int, device: int) -> None:
        ends = connection(self.clock, self.random, self._weather)
        for owner, peer, (stream, incoming, outgoing) in (
            (rank, other, ends[0]),
            (other, rank, ends[1]),
        ):
            process = self._processes[owner]
            link = process.me.group.hubs[device].attach(peer, stream)
            self._streams.setdefault((owner, peer), []).append(stream)
            incoming.on_arrival = partial(self._ready.append, partial(self._read, process, link))
            outgoing.on_room = partial(self._ready.append, partial(self._write, process, link))

    # Events

    def _handle_timer(self, process: _Process, callback: Callable[[], None]) -> None:
        if process.is_frozen:
            process.missed.append(partial(self._handle_timer, process, callback))
            return
        callback()
        self._after(process)

    def _read(self, process: _Process, link: Link) -> None:
        stream = link.stream
        assert isinstance(stream, PipeEnd)
        if stream.is_closed:
            return
        if process.is_frozen:
            process.missed.append(partial(self._read, process, link))
            return
        link.on_readable()
        if stream.has_something_to_read() and not stream.is_closed:
            self._ready.append(partial(self._read, process, link))
        self._after(process)

    def _write(self, process: _Process, link: Link) -> None:
        stream = link.stream
        assert isinstance(stream, PipeEnd)
        if not stream.wants_write or stream.is_closed:
            return
        if process.is_frozen:
            process.missed.append(partial(self._write, process, link))
            return
        link.on_writable()
        self._after(process)

    def _after(self, process: _Process) -> None:
        """A rank has handled an event: what its loop would do next."""
        for hub in process.me.group.hubs:
            hub.flush()
        process.me.group.loop.run_deferred()
        process.events += 1
        self._fire_faults(process)
        wait = process.wait
        if wait is not None and wait.pending.done:
            self._wake(process, is_late=False)

    def _wake(self, process: _Process, is_late: bool) -> None:
        process.wait = None
        if process.timer is not None:
            process.timer.cancel()
        process.is_late = is_late
        self._ready.append(partial(self._step, process))

    def _step(self, process: _Process) -> None:
        program = process.program
        if program is None or process.outcome is not None:
            return
        if process.is_frozen:
            process.missed.append(partial(self._step, process))
            return
        try:
            if process.is_started:
                wait = program.send(process.is_late)
            else:
                process.is_started = True
                wait = next(program)
        except StopIteration as stop:
            process.outcome = Returned(stop.value)
        except Exception as error:
            process.outcome = Raised(error, self.clock.now())
        else:
            process.wait = wait
            process.timer = self.clock.call_at(wait.at_s, partial(self._on_late, process, wait))
        self._after(process)

    def _on_late(self, process: _Process, wait: Wait) -> None:
        if process.wait is wait:
            self._wake(process, is_late=True)

    # Faults

    def _fire_faults(self, process: _Process) -> None:
        for fault in list(self._faults):
            if fault.rank == process.me.rank and process.events >= fault.after_events:
                self._faults.remove(fault)
                self.fired[fault] = self.clock.now()
                self._fire(fault, process)

    def _fire(self, fault: Fault, process: _Process) -> None:
        match fault:
            case Kill():
                self._kill(process)
            case Freeze():
                process.is_frozen = process.is_gone = True
            case Pause():
                process.is_frozen = True
                self.clock.call_at(self.clock.now() + fault.seconds, partial(self._thaw, process))
            case Cut():
                for stream in self._streams[fault.rank, fault.other]:
                    stream.break_off()
            case Hold():
                for some in fault.some:
                    for other in fault.others:
                        for stream in self._streams[some, other] + self._streams[other, some]:
                            stream.hold(fault.seconds)
            case Abort():
                process.me.abort("by a fault")

    def _thaw(self, process: _Process) -> None:
        if not process.is_gone:
            process.is_frozen = False
            self._ready += process.missed
            process.missed = []

    def _kill(self, process: _Process) -> None:
        process.outcome = Killed()
        process.is_frozen = process.is_gone = True
        process.wait = None
        for (owner, _), streams in self._streams.items():
            if owner == process.me.rank:
                for stream in streams:
                    # What was written may still arrive, or be dropped by a reset.
                    if self.random.random() < 0.5:
                        stream.close()
                    else:
                        stream.break_off()

    # The whole

    def run(self, program: Callable[[SimulatedRank], Program]) -> list[Outcome]:
        """What became of every rank. Raises `Stuck` or `FaultNeverFired`.

        Ends when every rank that is neither killed nor frozen has returned or raised. A frozen rank
        without an outcome counts as killed.
        """
        outcomes = self.outcomes_of(program)
        if self._faults:
            raise FaultNeverFired(f"{self._faults}")
        return outcomes

    def outcomes_of(self, program: Callable[[SimulatedRank], Program]) -> list[Outcome]:
        """As `run`, but faults need not fire: `fired` says which have."""
        for process in self._processes:
            process.program = program(process.me)
            self._ready.append(partial(self._step, process))
        while any(p.outcome is None and not p.is_gone for p in self._processes):
            if self._ready:
                index = self.random.randrange(len(self._ready))
                self._ready[index], self._ready[-1] = self._ready[-1], self._ready[index]
                self._ready.pop()()
            elif not self.clock.jump():
                waiting = [p.me.rank for p in self._processes if p.outcome is None]
                raise Stuck(f"ranks {waiting} wait, and nothing is under way")
        return [process.outcome or Killed() for process in self._processes]


def values(outcomes: Sequence[Outcome]) -> list[Any]:
    """What the ranks have returned. Raises the error that came first, if there is one."""
    raised = [outcome for outcome in outcomes if isinstance(outcome, Raised)]
    if raised:
        raise min(raised, key=lambda outcome: outcome.at_s).error
    results = []
    for outcome in outcomes:
        assert isinstance(outcome, Returned), outcome
        results.append(outcome.value)
    return results
