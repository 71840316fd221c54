"""A simulated rank: the real group with a simulated loop, whose operations are generators."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from impl.schedules.executor import Pending
from impl.testing.clock import SimulatedClock
from impl.transport.base import ANY_SOURCE, CallInfo, Combine, Deadline
from impl.transport.end_cause import EndCause
from impl.transport.memory import bytes_of
from impl.transport.messages.matching import PostedMessage
from impl.transport.sockets.collective_run import Collective
from impl.transport.sockets.collectives import CollectiveBuilder
from impl.transport.sockets.group import Expired, MessageGroup
from impl.transport.sockets.loop import Timer

TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Wait:
    """What a rank yields: it goes on when `pending` is done or the time has come."""

    pending: Pending
    at_s: float


# A rank is sent True when the time has come, False when what it waited for is done.
Program: TypeAlias = Generator[Wait, bool, Any]


class SimulatedLoop:
    """What a group needs of a loop: here all ranks share one clock."""

    def __init__(self, clock: SimulatedClock) -> None:
        self.on_timer: Callable[[Callable[[], None]], None] = lambda callback: callback()
        self._clock = clock
        self._deferred: list[Callable[[], None]] = []

    @property
    def lock(self) -> AbstractContextManager[object]:
        return nullcontext()

    def now(self) -> float:
        return self._clock.now()

    def call_at(self, due_s: float, callback: Callable[[], None]) -> Timer:
        return self._clock.call_at(due_s, lambda: self.on_timer(callback))

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
