"""Base class of a TCP group, without sockets: runs collectives, turns failures into errors, ends.

`TcpGroup` and `GlooGroup` are the two kinds. A communicator adds sockets and a loop that waits; the
simulation adds streams of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

from impl import errors
from impl.schedules.executor import Pending
from impl.transport.base import CallInfo, Deadline
from impl.transport.end_cause import EndCause, Fate
from impl.transport.lent import MemoryGone
from impl.transport.messages.frames import FrameRules, Preamble
from impl.transport.messages.hub import Hub, Link, PeerGone
from impl.transport.messages.matching import (
    MessageExchange,
    NobodyLeft,
    PostedMessage,
    SizeMismatch,
)
from impl.transport.messages.own_messages import OwnMessages
from impl.transport.messages.streams import SendQueue
from impl.transport.sockets.collective_run import Collective, MessageFailed
from impl.transport.sockets.collectives import Plans
from impl.transport.sockets.loop import Loop


class Expired(Exception):
    """The time of one message has run out."""


class MessageGroup(ABC):
    """One rank's view of its group. Errors are made here, with the names of all concerned.

    Methods that are called by hubs, and those that say so, run with the loop's lock held.
    """

    kind: str
    plans: Plans
    compares_splits = False  # whether ranks tell each other their splits before they exchange

    def __init__(
        self,
        rank: int,
        world_size: int,
        name: str,
        device_count: int,
        rules: FrameRules,
        make_exchange: Callable[[Callable[[int], SendQueue]], MessageExchange],
        loop: Loop,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.name = name
        self.loop = loop
        self.fate: Fate | None = None
        self.peers = [peer for peer in range(world_size) if peer != rank]
        self.hubs = [Hub(self.peers, rules, make_exchange, self) for _ in range(device_count)]
        self._call: CallInfo | None = None  # the present collective

    # What the kinds of group do differently

    @abstractmethod
    def _begin(self, collective: Collective, call: CallInfo) -> Iterator[Pending]:
        """The steps of a collective. Raises `MessageFailed`, now or later."""

    @abstractmethod
    def _waits_for(self) -> str:
        """Which ranks the present collective waits for, to end a sentence in an error."""

    @abstractmethod
    def end(self, fate: Fate) -> None:
        """Make this the group's fate, unless it has one. With the lock held."""

    @abstractmethod
    def say_goodbye(self) -> None:
        """Queue the final frames, if there are any. With the lock held."""

    @abstractmethod
    def slot_of_tag(self, tag: int) -> int:
        """The slot of messages with this tag. Raises ValueError."""

    def own_messages(self, call: CallInfo) -> OwnMessages:
        """The queue for messages of this rank to itself. Raises ValueError if there is none."""
        where = f"{self.where(call)}, rank {self.rank}"
        raise ValueError(f"{where}: a rank cannot exchange messages with itself")

    @abstractmethod
    def control_tag(self, number: int) -> int:
        """See `Communicator`."""

    @abstractmethod
    def link_closed(self, link: Link, how: str, after_farewell: bool) -> None:
        """See `HubOwner`."""

    def cannot_send(self, link: Link, gone: MemoryGone) -> None:
        """See `HubOwner`. The group ends: no message that comes later may take this one's place."""
        text = f"rank {self.rank} cannot send to rank {link.peer}: {gone}."
        self.end(Fate(EndCause.ABORT, self.rank, text))

    @abstractmethod
    def on_control(self, peer: int, frame: Preamble, text: str) -> None:
        """See `HubOwner`."""

    # Collectives

    def steps(self, collective: Collective, call: CallInfo) -> Iterator[Pending]:
        """Carry out a collective: yields what must happen before it can go on.

        Raises the errors of `Communicator`. Its driver calls `time_out` or `interrupt`
        when it does not go on.
        """
        self.raise_fate(call)
        self._call = call
        try:
            yield from self._begin(collective, call)
        except MessageFailed as failed:
            yield from self._settle(failed.cause)
            raise self._explain(failed.cause, call) from None
        except MemoryGone as gone:
            raise self._explain(gone, call) from None
        finally:
            self._call = None

    def _settle(self, cause: Exception) -> Iterator[Pending]:
        """Wait for what must still arrive before an error can be raised."""
        yield from ()

    def _explain(self, cause: Exception, call: CallInfo) -> errors.CommunicationError:
        """The error to raise after a message of a collective has failed. It ends the group."""
        where = self.where(call)
        if isinstance(cause, PeerGone):
            text = errors.peer_lost_message(where, [cause.peer], self.world_size, cause.how)
            return self.give_up(EndCause.LOST, text, call, lost=[cause.peer])
        if isinstance(cause, SizeMismatch):
            return self.give_up(EndCause.MISMATCH, f"{where}: {cause}.", call)
        if isinstance(cause, MemoryGone):
            where = f"{where}, rank {self.rank} of {self.world_size}"
        return self.give_up(EndCause.ABORT, f"{where}: {cause}.", call)

    def time_out(self, call: CallInfo, until: Deadline) -> errors.CommunicationError:
        """The deadline of a collective has passed: end the group. The error to raise."""
        text = errors.timeout_message(
            self.where(call),
            call.operation,
            until.timeout_s,
            self.rank,
            self.world_size,
            self._waits_for(),
        )
        return self.give_up(EndCause.TIMEOUT, text, call)

    def own_splits_differ(
        self, sent: int, wanted: int, call: CallInfo
    ) -> errors.CommunicationError:
        """This rank's splits disagree on what it sends itself: end the group. Returns the error."""
        text = (
            f"{self.where(call)}, rank {self.rank} of {self.world_size}: rank {self.rank} gives "
            f"itself {sent} elements, and expects {wanted}."
        )
        return self.give_up(EndCause.MISMATCH, text, call)

    def interrupt(self, call: CallInfo) -> None:
        """A collective was interrupted: its peers will never get what they wait for."""
        if self.fate is None:
            text = f"{self.where(call)} was interrupted on rank {self.rank}."
            self.give_up(EndCause.ABORT, text, call)

    def break_off(self, error: BaseException) -> None:
        """A change of the group's state was broken off: the group ends. With the lock held."""
        text = f"{self.where(self._call)} was interrupted on rank {self.rank}: {error!r}."
        self.end(Fate(EndCause.ABORT, self.rank, text))

    # Single messages

    def explain_message(
        self, message: PostedMessage, call: CallInfo, until: Deadline
    ) -> errors.CommunicationError:
        """The error of one message between two ranks, which fails alone."""
        cause, where = message.error, self.where(call)
        if self.fate is not None:
            return self.fate.error(where, self.rank, self.world_size)
        if isinstance(cause, Expired):
            missing = "no rank has sent" if message.peer < 0 else f"peer is rank {message.peer}"
            text = errors.timeout_message(
                where, call.operation, until.timeout_s, self.rank, self.world_size, missing
            )
            return errors.CollectiveTimeout(text)
        if isinstance(cause, PeerGone):
            text = errors.peer_lost_message(where, [cause.peer], self.world_size, cause.how)
            return errors.PeerLost(text, [cause.peer])
        where = f"{where}, rank {self.rank} of {self.world_size}"
        if isinstance(cause, NobodyLeft):
            return errors.PeerLost(f"{where}: {cause}. Connection closed by peer.")
        if isinstance(cause, SizeMismatch):
            return errors.CollectiveMismatch(f"{where}: {cause}.")
        return errors.Aborted(f"{where}: {cause}.")

    # The end

    def where(self, call: CallInfo | None) -> str:
        """How an error begins."""
        if call is None:
            return f"group {self.name!r}"
        return errors.describe_call(call.operation, call.sequence, self.name)

    def raise_fate(self, call: CallInfo) -> None:
        """Raise why the group has ended, if it has."""
        if self.fate is not None:
            raise self.fate.error(self.where(call), self.rank, self.world_size)

    def give_up(
        self, cause: EndCause, text: str, call: CallInfo | None = None, *, lost: Sequence[int] = ()
    ) -> errors.CommunicationError:
        """End the group, unless it has ended: the error to raise. Without the lock.

        lost: the ranks that are gone, if that is the cause.
        """
        with self.loop.lock:
            self.end(Fate(cause, self.rank, text, tuple(lost)))
        self.loop.run_deferred()
        assert self.fate is not None
        return self.fate.error(self.where(call), self.rank, self.world_size)

    def close(self) -> None:
        """End all messages and connections at once. With the lock held."""
        if self.fate is None:
            text = f"{self.where(None)} was destroyed on rank {self.rank}."
            self.fate = Fate(EndCause.ABORT, self.rank, text)
        for hub in self.hubs:
            hub.close(errors.Aborted(self.fate.text))

    def disown(self) -> None:
        """In a forked child: refuse to work. The connections belong to the parent."""
        text = f"{self.where(None)} belongs to the process that created it, and this is a child."
        self.fate = Fate(EndCause.ABORT, self.rank, text)


def what_is_missing(peers: Sequence[int], world_size: int) -> str:
    """For an error: something is missing of these ranks, which may be there and wait as well."""
    if not peers:
        return "its own messages did not leave"
    text = f"{errors.list_ranks(peers)} did not send or receive what was due"
    if world_size == 2:
        return text
    waits = "it stopped or itself waits" if len(peers) == 1 else "they stopped or themselves wait"
    return f"{text}; whether {waits} for another rank is not known"
