"""Matching of posted sends and receives: interface and helpers of both protocols. Without I/O.

[Note: what an exchange is]
A `MessageExchange` knows the messages that one rank wants to send or receive, and what its peers
have said about theirs. Callers post messages; the connections feed in what arrives; the exchange
answers by putting frames on the peers' queues and by ending messages. It is called by one thread
at a time.

Messages of one (sender, receiver, slot) meet in the order in which they were posted. The two
modes differ in how they make sure that a message does not arrive before there is memory for it:
`credits.py` speaks Gloo's protocol, `eager.py` our own.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from impl.transport.lent import MemoryGone, is_there
from impl.transport.messages.frames import Preamble


class PostedMessage:
    """One end of a message: a posted send or receive.

    `peer` is -1 for a receive from anyone, until a sender is found. `view` is where the bytes are
    or belong; None once the owner has taken the memory away. `on_done` is called at the end,
    while the exchange is in the middle of things: it may take a note, no more. `under_way` holds
    the message until then.
    """

    __slots__ = ("done", "error", "nbytes", "on_done", "peer", "slot", "under_way", "view")

    def __init__(
        self,
        peer: int,
        slot: int,
        view: memoryview,
        on_done: Callable[[PostedMessage], None] | None = None,
    ) -> None:
        self.peer = peer
        self.slot = slot
        self.view: memoryview | None = view
        self.nbytes = len(view)
        self.on_done = on_done
        self.under_way: set[PostedMessage] | None = None
        self.done = False
        self.error: Exception | None = None

    def finish(self, error: Exception | None = None) -> None:
        """End the message; a second call changes nothing."""
        if not self.done:
            self.done, self.error = True, error
            if self.on_done is not None:
                self.on_done(self)
            if self.under_way is not None:
                self.under_way.discard(self)

    def __repr__(self) -> str:
        state = "failed" if self.error else "done" if self.done else "pending"
        return f"<PostedMessage peer={self.peer} slot={self.slot:#x} {self.nbytes} bytes, {state}>"


class SizeMismatch(Exception):
    """A message and its receive differ in size."""

    def __init__(self, sender: int, receiver: int, sent_nbytes: int, wanted_nbytes: int) -> None:
        super().__init__(
            f"rank {sender} sent {sent_nbytes} bytes where rank {receiver} expected {wanted_nbytes}"
        )


class MessageExchange(Protocol):
    """What connections and communicators need of a mode.

    The frame methods raise `ProtocolError` when the peer breaks the rules; the caller then drops
    the connection and calls `fail_peer`.
    """

    def post_send(self, message: PostedMessage) -> None: ...

    def post_receive(self, message: PostedMessage) -> None: ...

    def post_receive_any(self, message: PostedMessage, sources: Sequence[int]) -> None:
        """Receive from whichever of `sources` is the first to send on this slot."""

    def on_frame(self, peer: int, frame: Preamble) -> None: ...

    def on_payload_begins(self, peer: int, frame: Preamble) -> memoryview | None:
        """Where the payload belongs: `frame.length` bytes, or None to drop it."""

    def on_payload_ends(self, peer: int, frame: Preamble) -> None: ...

    def cancel(self, message: PostedMessage, error: Exception) -> memoryview | None:
        """Make one message fail alone, and forget its memory.

        What a peer has already been promised is kept: a send goes out from a copy, and what
        arrives for a receive goes to the one behind it or waits for the next one. If its payload
        is arriving at this very moment, the result is where it belongs from now on (see
        `FrameReader.relocate`).
        """

    def fail_peer(self, peer: int, error: Exception) -> None:
        """The peer is gone: present and later messages to and from it fail.

        A message that has arrived in full can still be received.
        """


@dataclass(slots=True, eq=False)
class PendingReceive:
    """A receive that a peer is or will be told of, and the message that it was posted for.

    Once the peer has been told, that cannot be taken back: when the message is cancelled the
    receive stays, and the next one of the conversation takes it over, or the payload that has
    arrived meanwhile.
    """

    nbytes: int
    message: PostedMessage | None
    arrived: bytearray | None = None  # the payload, if there was no message to put it in
    is_complete: bool = False
    place: int = field(default_factory=itertools.count().__next__)  # grows along a conversation


def memory_for(receive: PendingReceive) -> memoryview | None:
    """Where a receive's payload belongs: in its message, or in memory that waits for one."""
    if receive.message is not None:
        return receive.message.view
    receive.arrived = bytearray(receive.nbytes)
    return memoryview(receive.arrived)


def complete(receive: PendingReceive) -> None:
    """The payload is there; its message, if it has one, is done."""
    receive.is_complete = True
    message = receive.message
    if message is not None and not message.done:
        assert message.view is not None
        if not is_there(message.view):
            message.finish(MemoryGone())
            return
        if receive.arrived is not None:
            message.view[:] = receive.arrived
        message.finish()


def take_over(receive: PendingReceive, message: PostedMessage, rank: int) -> None:
    """Serve a message of `rank` by a receive that a cancelled one has left behind."""
    if receive.nbytes != message.nbytes:
        message.finish(SizeMismatch(message.peer, rank, receive.nbytes, message.nbytes))
        return
    receive.message = message
    if receive.is_complete:
        complete(receive)


def vacate(receives: Sequence[PendingReceive], message: PostedMessage) -> PendingReceive | None:
    """Take a cancelled message out of receives that a peer has been told of, in their order.

    The messages behind it move up as far as they are of its size, so that they still meet what is
    sent in order. Returns the receive that is left without one; None if the message was in none.
    """
    vacant = None
    for receive in receives:
        if vacant is None:
            vacant = receive if receive.message is message else None
        elif receive.message is None or receive.nbytes != vacant.nbytes:
            break
        else:
            vacant.message, vacant = receive.message, receive
    if vacant is not None:
        vacant.message = None
    return vacant


def in_order(receives: Iterable[PendingReceive]) -> deque[PendingReceive]:
    return deque(sorted(receives, key=lambda receive: receive.place))


class NobodyLeft(Exception):
    """A receive from any source fails, since every rank that could send is gone."""


class AnySource:
    """Who waits on which slot without having found a partner: senders, and receives from anyone.

    Senders are served in the order in which their first frame came, across all peers.
    """

    def __init__(self) -> None:
        self._senders: dict[int, deque[int]] = {}  # slot -> peers, one entry a message
        self._receives: dict[int, deque[tuple[PostedMessage, frozenset[int]]]] = {}
        self._lost: set[int] = set()

    def find_sender(self, message: PostedMessage, sources: Iterable[int]) -> bool:
        """Set `message.peer` to the first sender among `sources`, or keep the receive for later."""
        allowed = frozenset(sources)
        for peer in self._senders.get(message.slot, ()):
            if peer in allowed:
                message.peer = peer
                return True
        if allowed <= self._lost:
            message.finish(NobodyLeft("no rank is left that could send"))
        else:
            self._receives.setdefault(message.slot, deque()).append((message, allowed))
        return False

    def sender_waits(self, slot: int, peer: int) -> PostedMessage | None:
        """The receive from any source that takes a message of `peer`, if there is one."""
        self._senders.setdefault(slot, deque()).append(peer)
        for message, allowed in self._receives.get(slot, ()):
            if peer in allowed:
                self.forget(message)
                message.peer = peer
                return message
        return None

    def sender_served(self, slot: int, peer: int) -> None:
        self.sender_gone(slot, peer, kept=self._senders[slot].count(peer) - 1)

    def sender_gone(self, slot: int, peer: int, kept: int = 0) -> None:
        """Of the messages that `peer` has waiting on this slot, only the last `kept` remain.

        There may be fewer already: see [Note: changes that are broken off].
        """
        senders = self._senders.get(slot, deque())
        for _ in range(senders.count(peer) - kept):
            senders.remove(peer)
        if not senders:
            self._senders.pop(slot, None)

    def forget(self, message: PostedMessage) -> None:
        waiting = self._receives.get(message.slot, deque())
        for entry in list(waiting):
            if entry[0] is message:
                waiting.remove(entry)
        if not waiting:
            self._receives.pop(message.slot, None)

    def fail_peer(self, peer: int) -> list[PostedMessage]:
        """The receives that no one is left to serve."""
        self._lost.add(peer)
        hopeless = [
            message
            for waiting in self._receives.values()
            for message, allowed in waiting
            if allowed <= self._lost
        ]
        for message in hopeless:
            self.forget(message)
        return hopeless
