"""Running a collective's schedule on message hubs, in both protocols, for sockets and simulations.

A core turns a `Collective` into messages on its hubs. It is a generator like the executor: it
yields what must happen before it can go on. `GlooCore` does what C++ Gloo does; `TcpCore` makes
sure first that all ranks mean the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from impl.schedules.barrier import dissemination_barrier
from impl.schedules.executor import Pending, execute
from impl.schedules.steps import Schedule
from impl.transport.base import CallInfo, Combine
from impl.transport.memory import ScratchPool, StagingCache, TensorMemory
from impl.transport.messages.eager import COLLECTIVE_SLOT, EagerExchange
from impl.transport.messages.frames import Opcode, SlotPrefix, collective_slot
from impl.transport.messages.hub import Hub
from impl.transport.messages.matching import PostedMessage
from impl.transport.mismatch_detection import Agreement

STAGED_NBYTES_MAX = 64 << 10
EVERYBODY_TALKS_MAX = 16  # world size up to which all ranks tell all others their call number


@dataclass(frozen=True, slots=True)
class Collective:
    """What one rank does: a schedule and the tensors that it works on."""

    prefix: SlotPrefix
    plan: Schedule
    output: Sequence[Tensor] = ()
    input: Sequence[Tensor] = ()
    combine: Combine | None = None
    output_starts_filled: bool = False  # works in place: OUTPUT holds the contribution

    @property
    def dtype(self) -> torch.dtype:
        return next((t.dtype for t in (*self.output, *self.input)), torch.uint8)

    @property
    def output_nbytes(self) -> int:
        return sum([tensor.numel() * tensor.element_size() for tensor in self.output])

    @property
    def input_nbytes(self) -> int:
        return sum([tensor.numel() * tensor.element_size() for tensor in self.input])


class MessageFailed(Exception):
    """A message of the collective failed; `cause` says why."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class HubPort:
    """Sends and receives for the executor, on one slot of one hub."""

    def __init__(self, hub: Hub, slot: int, lock: AbstractContextManager[object]) -> None:
        self._hub = hub
        self._slot = slot
        self._lock = lock
        self._open: set[PostedMessage] = set()
        self._error: Exception | None = None

    def send(self, to: int, data: memoryview) -> PostedMessage:
        message = PostedMessage(to, self._slot, data, self._on_done)
        with self._lock:
            self._open.add(message)
            self._hub.post_send(message)
        self.check()
        return message

    def receive(self, source: int, into: memoryview) -> PostedMessage:
        message = PostedMessage(source, self._slot, into, self._on_done)
        with self._lock:
            self._open.add(message)
            self._hub.post_receive(message)
        self.check()
        return message

    def flush(self) -> None:
        if self._hub.has_news:
            with self._lock:
                self._hub.flush()
        self.check()

    def _on_done(self, message: PostedMessage) -> None:
        self._open.discard(message)
        if message.error is not None and self._error is None:
            self._error = message.error

    def fail(self, error: Exception) -> None:
        """End all messages that are under way, and refuse others."""
        if self._error is None:
            self._error = error
        for message in list(self._open):
            message.finish(error)

    def check(self) -> None:
        """Raises `MessageFailed` if any message has failed so far."""
        if self._error is not None:
            raise MessageFailed(self._error)

    @property
    def waits_for(self) -> list[int]:
        """The peers of the messages that have not ended."""
        # a copy: the caller does not hold the lock
        return sorted({message.peer for message in list(self._open)})


class GlooCore:
    """Collectives as C++ Gloo runs them, on one slot for each tag."""

    def __init__(self, hubs: Sequence[Hub], lock: AbstractContextManager[object]) -> None:
        self.port: HubPort | None = None  # of the present collective
        self._hubs = hubs
        self._lock = lock
        self._scratch = ScratchPool()

    def run(self, collective: Collective, tag: int) -> Iterator[Pending]:
        """Raises `MessageFailed`. The generator must be driven to its end, or the core given up."""
        slot = collective_slot(collective.prefix, tag)
        port = self.port = HubPort(self._hubs[tag % len(self._hubs)], slot, self._lock)
        scratch = self._scratch.take(collective.plan.scratch_nbytes, collective.dtype)
        memory = TensorMemory(collective.output, collective.input, scratch, collective.combine)
        for pending in execute(collective.plan, memory, port):
            yield pending
            port.check()
        port.flush()


class Disputed(Exception):
    """Ranks have called different collectives."""


class TcpCore:
    """Collectives of the authenticated mode. See [Note: call numbers] in `mismatch_detection.py`.

    [Note: no tensor changes before all agree] A small collective works on copies of its tensors and
    hands it over at the end, when every peer has been heard: the frames with data carry the call
    numbers, so this costs no message unless a rank has nothing to say to some other one, which
    then gets a TOKEN. A large one exchanges tokens first. In large worlds, where tokens from
    every rank to every other would be too many, an empty barrier comes first; its messages carry
    the numbers as well.
    """

    def __init__(
        self, rank: int, world_size: int, hubs: Sequence[Hub], lock: AbstractContextManager[object]
    ) -> None:
        peers = [peer for peer in range(world_size) if peer != rank]
        self.agreement = Agreement(rank, peers)
        self.port: HubPort | None = None
        self._rank = rank
        self._world_size = world_size
        self._peers = peers
        self._hubs = hubs
        self._lock = lock
        self._scratch = ScratchPool()
        self._staging = StagingCache()
        self._calls = 0
        self._interruption: Exception | None = None

    def hear_call(self, peer: int, number: int) -> None:
        """A frame of a collective has arrived. (Given to the exchanges.)"""
        self.agreement.hear(peer, number)
        if self.agreement.dispute is not None:
            self.open_dispute()

    def open_dispute(self) -> None:
        """If this rank has reached the disputed call: stop, and tell all ranks what it called.

        A rank that is still in an earlier call finishes it: all have agreed on that one, and
        frames that belong to it may still be on their way. So the hubs stay as they are.
        """
        dispute = self.agreement.dispute
        assert dispute is not None
        if self.agreement.index < dispute.index or self._interruption is not None:
            return
        self._interruption = Disputed()
        self.agreement.give_up()
        if self.port is not None:
            self.port.fail(self._interruption)
        own = dispute.statements.get(self._rank)  # None if the call was too long ago
        if own is not None:
            for peer in self._hubs[0].links:
                self._hubs[0].say(peer, Opcode.STATEMENT, own.encode(dispute.index))

    def interrupt(self, error: Exception) -> None:
        """Make the present collective, and every later one, raise `MessageFailed(error)`."""
        if self._interruption is None:
            self._interruption = error
        self.agreement.give_up()
        for hub in self._hubs:
            if hub.silenced is None:
                hub.fail_messages(error)

    def run(self, collective: Collective, call: CallInfo) -> Iterator[Pending]:
        """Raises `MessageFailed`. The generator must be driven to its end, or the core given up."""
        hub = self._hubs[self._calls % len(self._hubs)]
        exchange = hub.exchange
        assert isinstance(exchange, EagerExchange)
        self._calls += 1
        port = self.port = HubPort(hub, COLLECTIVE_SLOT, self._lock)
        with self._lock:
            exchange.begin_call(self.agreement.begin(call))
            if self.agreement.dispute is not None:
                self.open_dispute()
            # Who leaves from here on is known to have missed this call. See `link_closed`.
            gone = [each for hub in self._hubs for each in hub.lost.values()]
        if self._interruption is not None:
            raise MessageFailed(self._interruption)
        if gone:
            raise MessageFailed(gone[0])
        everybody_talks = self._everybody_talks
        if not everybody_talks:
            yield from self._carry_out(Collective(SlotPrefix.BARRIER, self._barrier()), port)
            with self._lock:
                self.agreement.assume_heard()
        if max(collective.output_nbytes, collective.input_nbytes) > STAGED_NBYTES_MAX:
            if everybody_talks:
                yield from self._hear_everybody(exchange, port)
            yield from self._carry_out(collective, port)
            return
        staged = self._staging.take(
            collective.plan, collective.dtype, collective.output_nbytes, collective.input_nbytes
        )
        filled = collective.output if collective.output_starts_filled else ()
        staged.lay_out(filled, collective.input, collective.combine)
        for pending in execute(collective.plan, staged, port):
            if everybody_talks:
                self._tell_the_rest(exchange)
            yield pending
            port.check()
        if everybody_talks:
            yield from self._hear_everybody(exchange, port)
        port.flush()
        staged.hand_over(collective.output)

    @property
    def _everybody_talks(self) -> bool:
        return self._world_size <= EVERYBODY_TALKS_MAX

    @property
    def absent(self) -> list[int]:
        """The ranks that are known not to have reached the present call.

        In a large world most ranks say nothing to this one, wherever they are.
        """
        return self.agreement.missing if self._everybody_talks else []

    def _barrier(self) -> Schedule:
        return dissemination_barrier(self._rank, self._world_size)

    def _memory(self, collective: Collective) -> TensorMemory:
        scratch = self._scratch.take(collective.plan.scratch_nbytes, collective.dtype)
        return TensorMemory(collective.output, collective.input, scratch, collective.combine)

    def _carry_out(self, collective: Collective, port: HubPort) -> Iterator[Pending]:
        for pending in execute(collective.plan, self._memory(collective), port):
            yield pending
            port.check()
        port.flush()

    def _tell_the_rest(self, exchange: EagerExchange) -> None:
        if len(exchange.told) < len(self._peers):
            with self._lock:
                for peer in self._peers:
                    exchange.tell_call(peer)

    def _hear_everybody(self, exchange: EagerExchange, port: HubPort) -> Iterator[Pending]:
        self._tell_the_rest(exchange)
        port.flush()
        while not self.agreement.done:
            yield self.agreement
        if self._interruption is not None:
            raise MessageFailed(self._interruption)
