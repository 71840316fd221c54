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

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, TypeAlias

from torch import Tensor

from impl.schedules.executor import Pending
from impl.testing.clock import SimulatedClock
from impl.testing.network import PipeEnd, Weather, connection
from impl.transport.base import ANY_SOURCE, CallInfo, Combine, Deadline
from impl.transport.end_cause import EndCause
from impl.transport.memory import bytes_of
from impl.transport.messages.hub import Link
from impl.transport.messages.matching import PostedMessage
from impl.transport.sockets.collective_run import Collective
from impl.transport.sockets.collectives import CollectiveBuilder
from impl.transport.sockets.gloo_group import GlooGroup
from impl.transport.sockets.group import Expired, MessageGroup
from impl.transport.sockets.loop import Timer
from impl.transport.sockets.tcp_group import TcpGroup

TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Wait:
    """What a rank yields: it goes on when `pending` is done or the time has come."""

    pending: Pending
    at_s: float


# A rank is sent True when the time has come, False when what it waited for is done.
Program: TypeAlias = Generator[Wait, bool, Any]


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


Fault: TypeAlias = "Kill | Cut | Freeze"


class Stuck(AssertionError):
    """No rank can go on, and nothing is under way."""


class FaultNeverFired(AssertionError):
    """A simulation ended before one of its faults was due."""


class SimulatedLoop:
    """What a group needs of a loop: here all ranks share one clock."""

    def __init__(self, clock: SimulatedClock, on_timer: Callable[[], None]) -> None:
        self._clock = clock
        self._on_timer = on_timer
        self._deferred: list[Callable[[], None]] = []

    @property
    def lock(self) -> AbstractContextManager[object]:
        return nullcontext()

    def now(self) -> float:
        return self._clock.now()

    def call_at(self, due_s: float, callback: Callable[[], None]) -> Timer:
        def call() -> None:
            callback()
            self._on_timer()

        return self._clock.call_at(due_s, call)

    def notify(self) -> None: ...

    def defer(self, callback: Callable[[], None]) -> None:
        self._deferred.append(callback)

    def run_deferred(self) -> None:
        while self._deferred:
            self._deferred.pop(0)()


class SimulatedRank:
    """What a program may do: the operations of `Communicator`, each a generator."""

    def __init__(self, group: MessageGroup, clock: SimulatedClock) -> None:
        self.rank = group.rank
        self.world_size = group.world_size
        self.group = group
        self._clock = clock
        self._build = CollectiveBuilder(group.rank, group.world_size, group.plans)
        self._sequence = 0
        self._tensors: list[Tensor] = []

    def _deadline(self, timeout_s: float) -> Deadline:
        return Deadline(self._clock.now() + timeout_s, timeout_s)

    def collective(
        self, operation: str, collective: Collective, signature: str, timeout_s: float = TIMEOUT_S
    ) -> Program:
        """Any collective, with a signature of the caller's choice."""
        call = CallInfo(operation, self._sequence, signature, signature)
        self._sequence += 1
        until = self._deadline(timeout_s)
        try:
            for pending in self.group.steps(collective, call):
                while not pending.done:
                    if (yield Wait(pending, until.at_s)):
                        raise self.group.time_out(call, until)
        except Exception:
            self.group.interrupt(call)
            raise

    def all_reduce(self, tensor: Tensor, combine: Combine, signature: str = "") -> Program:
        built = self._build.all_reduce(tensor, combine)
        yield from self.collective("all_reduce", built, signature or _describe(tensor, combine))

    def reduce(self, tensor: Tensor, root: int, combine: Combine) -> Program:
        built = self._build.reduce(tensor, root, combine)
        yield from self.collective("reduce", built, f"{_describe(tensor, combine)} root={root}")

    def broadcast(self, tensor: Tensor, root: int) -> Program:
        built = self._build.broadcast(tensor, root)
        yield from self.collective("broadcast", built, f"{_describe(tensor)} root={root}")

    def all_gather(self, output: Tensor, input: Tensor) -> Program:
        built = self._build.all_gather(output, input)
        yield from self.collective("all_gather", built, _describe(input))

    def all_gather_v(self, outputs: Sequence[Tensor], input: Tensor) -> Program:
        yield from self.collective("all_gather", self._build.all_gather_v(outputs, input), "")

    def reduce_scatter(self, output: Tensor, input: Tensor, combine: Combine) -> Program:
        built = self._build.reduce_scatter(output, input, combine)
        yield from self.collective("reduce_scatter", built, _describe(input, combine))

    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
    ) -> Program:
        built = self._build.all_to_all(output, input, output_splits, input_splits)
        yield from self.collective("all_to_all", built, "")

    def gather(self, outputs: Sequence[Tensor] | None, input: Tensor, root: int) -> Program:
        built = self._build.gather(outputs, input, root)
        yield from self.collective("gather", built, f"{_describe(input)} root={root}")

    def scatter(self, output: Tensor, inputs: Sequence[Tensor] | None, root: int) -> Program:
        built = self._build.scatter(output, inputs, root)
        yield from self.collective("scatter", built, f"{_describe(output)} root={root}")

    def barrier(self, timeout_s: float = TIMEOUT_S) -> Program:
        yield from self.collective("barrier", self._build.barrier(), "", timeout_s)

    def _message(self, peer: int, tensor: Tensor, tag: int) -> PostedMessage:
        message = PostedMessage(peer, self.group.slot_of_tag(tag), bytes_of(tensor))
        self._tensors.append(tensor)  # must live as long as bytes may move
        return message

    def post_send(self, tensor: Tensor, dst: int, tag: int = 0) -> PostedMessage:
        """Start sending. Wait for the message with `wait`."""
        hub = self.group.hubs[tag % len(self.group.hubs)]
        message = self._message(dst, tensor, tag)
        hub.post_send(message)
        return message

    def post_receive(self, tensor: Tensor, src: int, tag: int = 0) -> PostedMessage:
        """Start receiving. `src` may be ANY_SOURCE; `message.peer` says who has sent."""
        hub = self.group.hubs[tag % len(self.group.hubs)]
        message = self._message(src, tensor, tag)
        if src == ANY_SOURCE:
            hub.post_receive_any(message, hub.peers)
        else:
            hub.post_receive(message)
        return message

    def wait(self, message: PostedMessage, timeout_s: float = TIMEOUT_S) -> Program:
        """Raises the error of the message."""
        until = self._deadline(timeout_s)
        while not message.done:
            if (yield Wait(message, until.at_s)):
                for hub in self.group.hubs:
                    hub.cancel(message, Expired())
        if message.error is not None:
            raise self.group.explain_message(message, CallInfo("message", -1, ""), until)

    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> Program:
        yield from self.wait(self.post_send(tensor, dst, tag))

    def receive(self, tensor: Tensor, src: int, tag: int = 0) -> Program:
        """Returns the rank that has sent."""
        message = self.post_receive(tensor, src, tag)
        yield from self.wait(message)
        return message.peer

    def sleep(self, seconds: float) -> Program:
        """Compute for a while."""
        yield Wait(_Never(), self._clock.now() + seconds)

    def abort(self, reason: str) -> None:
        self.group.give_up(EndCause.ABORT, f"{self.group.where(None)} was aborted: {reason}.")

    def leave(self) -> None:
        """Say goodbye and close, in good order."""
        self.group.say_goodbye()
        for hub in self.group.hubs:
            hub.flush()
        self.group.close()


class _Never:
    done = False


def _describe(tensor: Tensor, combine: Combine | None = None) -> str:
    op = f"op={combine.name} " if combine is not None else ""
    return f"{op}dtype={str(tensor.dtype).removeprefix('torch.')} numel={tensor.numel()}"


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
        self._weather = weather or Weather()
        self._faults = list(faults)
        self._ready: list[Callable[[], None]] = []  # events that may happen now, in any order
        self._streams: dict[tuple[int, int], list[PipeEnd]] = {}
        kinds: dict[str, type[TcpGroup] | type[GlooGroup]] = {"tcp": TcpGroup, "gloo": GlooGroup}
        self._processes: list[_Process] = []
        for rank in range(world_size):
            loop = SimulatedLoop(self.clock, partial(self._after_timer, rank))
            group = kinds[mode](rank, world_size, "simulated", device_count, loop)
            self._processes.append(_Process(SimulatedRank(group, self.clock), None))
        for device in range(device_count):
            for rank in range(world_size):
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

    def _after_timer(self, rank: int) -> None:
        self._after(self._processes[rank])

    def _read(self, process: _Process, link: Link) -> None:
        stream = link.stream
        assert isinstance(stream, PipeEnd)
        if stream.is_closed or process.is_frozen:
            return
        link.on_readable()
        if stream.has_something_to_read() and not stream.is_closed:
            self._ready.append(partial(self._read, process, link))
        self._after(process)

    def _write(self, process: _Process, link: Link) -> None:
        stream = link.stream
        assert isinstance(stream, PipeEnd)
        if stream.wants_write and not stream.is_closed and not process.is_frozen:
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
        if program is None or process.is_frozen or process.outcome is not None:
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
                if isinstance(fault, Kill):
                    self._kill(process)
                elif isinstance(fault, Freeze):
                    process.is_frozen = True
                else:
                    for stream in self._streams[fault.rank, fault.other]:
                        stream.break_off()

    def _kill(self, process: _Process) -> None:
        process.outcome = Killed()
        process.is_frozen = True
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
        for process in self._processes:
            process.program = program(process.me)
            self._ready.append(partial(self._step, process))
        while any(p.outcome is None and not p.is_frozen for p in self._processes):
            if self._ready:
                index = self.random.randrange(len(self._ready))
                self._ready[index], self._ready[-1] = self._ready[-1], self._ready[index]
                self._ready.pop()()
            elif not self.clock.jump():
                waiting = [p.me.rank for p in self._processes if p.outcome is None]
                raise Stuck(f"ranks {waiting} wait, and nothing is under way")
        if self._faults:
            raise FaultNeverFired(f"{self._faults}")
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
