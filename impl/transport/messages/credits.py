"""Gloo's credit-based message protocol (rendezvous): data are sent after the receiver is ready.

[Note: credits]
For each (peer, slot) two ranks keep each other informed by frames without payload. A posted send
says SEND_READY, a posted receive says RECV_READY, and the data follow once a rank has both a send
of its own and a RECV_READY from its peer: every RECV_READY is a credit for one message. For one
side (pair.cc and context.cc of gloo/transport):

    event                 when                                      then
    send posted           a credit is left                          use it; SEND_READY, DATA
                          otherwise                                 queue it; SEND_READY
    receive posted        a SEND_READY is left                      use it; queue; RECV_READY
                          otherwise                                 one is due; queue; RECV_READY
    SEND_READY arrives    one is due                                it is not due any more
                          someone receives from anyone              queue that; RECV_READY
                          otherwise                                 keep it, in order of arrival
    RECV_READY arrives    a send is queued                          DATA
                          otherwise                                 keep the credit
    DATA arrives          a receive is queued, and none is due      it belongs there
                          otherwise                                 protocol error

C++ Gloo ends the process at DATA without a receive; here it costs the connection.

[Note: sizes that differ]
Both sides learn the other's size before any data move, and both fail. C++ Gloo accepts a message
that is shorter than its receive, so a short one is still sent and a C++ peer does not wait in
vain. A long one is not sent: it would end a C++ peer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from impl.transport.lent import copy_of
from impl.transport.messages.frames import Opcode, Preamble, ProtocolError, frame_header
from impl.transport.messages.matching import (
    AnySource,
    PendingReceive,
    PostedMessage,
    SizeMismatch,
    complete,
    in_order,
    memory_for,
    take_over,
    vacate,
)
from impl.transport.messages.streams import SendQueue


@dataclass(slots=True)
class CreditConversation:
    """What one rank knows of one (peer, slot). Empty ones are forgotten."""

    credits: deque[int] = field(default_factory=deque)  # sizes that the peer waits for
    announced: deque[int] = field(default_factory=deque)  # sizes that wait at the peer
    sends: deque[PostedMessage] = field(default_factory=deque)  # without a credit yet
    receives: deque[PendingReceive] = field(default_factory=deque)  # without data yet
    unannounced: deque[PendingReceive] = field(default_factory=deque)  # without SEND_READY yet
    unclaimed: deque[PendingReceive] = field(default_factory=deque)  # whose message was cancelled
    arriving: PendingReceive | None = None  # whose payload is under way

    def is_over(self) -> bool:
        return not (
            self.credits
            or self.announced
            or self.sends
            or self.receives
            or self.unannounced
            or self.unclaimed
            or self.arriving
        )


class CreditExchange:
    """Gloo's protocol for one rank on one device. See `Exchange` for what the methods mean."""

    def __init__(self, rank: int, queue_for: Callable[[int], SendQueue]) -> None:
        self._rank = rank
        self._queue_for = queue_for
        self._conversations: dict[tuple[int, int], CreditConversation] = {}
        self._anyone = AnySource()
        self._gone: dict[int, Exception] = {}  # peers whose connections have ended

    # Posting

    def post_send(self, message: PostedMessage) -> None:
        if message.peer in self._gone:
            message.finish(self._gone[message.peer])
            return
        talk = self._conversation(message.peer, message.slot)
        self._tell(message.peer, Opcode.SEND_READY, message.slot, message.nbytes)
        if talk.credits:
            self._send_data(message, wanted_nbytes=talk.credits.popleft())
            self._forget_if_over(message.peer, message.slot)
        else:
            talk.sends.append(message)

    def post_receive(self, message: PostedMessage) -> None:
        talk = self._conversation(message.peer, message.slot)
        if talk.unclaimed:
            receive = talk.unclaimed.popleft()
            if receive not in talk.unannounced:
                self._anyone.sender_served(message.slot, message.peer)
            take_over(receive, message, self._rank)
            self._forget_if_over(message.peer, message.slot)
            return
        if message.peer in self._gone:
            message.finish(self._gone[message.peer])
            self._forget_if_over(message.peer, message.slot)
            return
        receive = PendingReceive(message.nbytes, message)
        talk.receives.append(receive)
        self._tell(message.peer, Opcode.RECV_READY, message.slot, message.nbytes)
        if talk.announced:
            self._anyone.sender_served(message.slot, message.peer)
            self._meet(message.peer, message.slot, receive, talk.announced.popleft())
        else:
            talk.unannounced.append(receive)

    def post_receive_any(self, message: PostedMessage, sources: Sequence[int]) -> None:
        if self._anyone.find_sender(message, sources):
            self.post_receive(message)

    def _meet(self, peer: int, slot: int, receive: PendingReceive, sent_nbytes: int) -> None:
        """A receive has got its SEND_READY. If the message is too long, it will not be sent."""
        talk = self._conversations[peer, slot]
        if sent_nbytes <= receive.nbytes:
            if receive in talk.unclaimed:
                self._offer_to_anyone(peer, slot)
            return
        talk.receives.remove(receive)
        if receive.message is not None:
            receive.message.finish(SizeMismatch(peer, self._rank, sent_nbytes, receive.nbytes))
        elif receive in talk.unclaimed:
            talk.unclaimed.remove(receive)
        self._forget_if_over(peer, slot)

    # What arrives

    def on_frame(self, peer: int, frame: Preamble) -> None:
        if frame.opcode == Opcode.SEND_READY:
            self._on_send_ready(peer, frame.slot, frame.length)
        else:
            self._on_recv_ready(peer, frame.slot, frame.length)

    def _on_send_ready(self, peer: int, slot: int, nbytes: int) -> None:
        talk = self._conversation(peer, slot)
        if talk.unannounced:
            self._meet(peer, slot, talk.unannounced.popleft(), nbytes)
            return
        talk.announced.append(nbytes)
        self._offer_to_anyone(peer, slot)

    def _offer_to_anyone(self, peer: int, slot: int) -> None:
        message = self._anyone.sender_waits(slot, peer)
        if message is not None:
            self.post_receive(message)

    def _on_recv_ready(self, peer: int, slot: int, nbytes: int) -> None:
        talk = self._conversation(peer, slot)
        if talk.sends:
            self._send_data(talk.sends.popleft(), wanted_nbytes=nbytes)
            self._forget_if_over(peer, slot)
        else:
            talk.credits.append(nbytes)

    def on_payload_begins(self, peer: int, frame: Preamble) -> memoryview | None:
        talk = self._conversations.get((peer, frame.slot))
        if talk is None or not talk.receives:
            raise ProtocolError(f"data on slot {frame.slot:#x}, for which nothing was asked")
        if talk.unannounced and talk.unannounced[0] is talk.receives[0]:  # both are in order
            raise ProtocolError(f"data on slot {frame.slot:#x}, which were not announced")
        receive = talk.arriving = talk.receives.popleft()
        if frame.length != receive.nbytes:
            error = SizeMismatch(peer, self._rank, frame.length, receive.nbytes)
            if receive.message is not None:
                receive.message.finish(error)
            elif receive in talk.unclaimed:
                talk.unclaimed.remove(receive)
                self._anyone.sender_served(frame.slot, peer)
            return None
        return memory_for(receive)

    def on_payload_ends(self, peer: int, frame: Preamble) -> None:
        talk = self._conversations[peer, frame.slot]
        receive, talk.arriving = talk.arriving, None
        assert receive is not None
        complete(receive)
        self._forget_if_over(peer, frame.slot)

    # Failures

    def cancel(self, message: PostedMessage, error: Exception) -> memoryview | None:
        if message.done:
            return None
        new_home = None
        if message.peer < 0:
            self._anyone.forget(message)
        else:
            # Whether it waits for a credit or is half written: the peer has heard of a send.
            self._queue_for(message.peer).detach(message)
            talk = self._conversation(message.peer, message.slot)
            if message in talk.sends:
                assert message.view is not None
                message.view = copy_of(message.view)
            arriving = talk.arriving
            moves = arriving is not None and arriving.message is message
            told = [*([arriving] if arriving else []), *talk.receives]
            vacant = vacate(told, message)
            if vacant is not None:
                talk.unclaimed = in_order([*talk.unclaimed, vacant])
                if vacant not in talk.unannounced:
                    self._offer_to_anyone(message.peer, message.slot)
            if moves and arriving is not None and arriving.arrived is None:
                new_home = memory_for(arriving)
            self._forget_if_over(message.peer, message.slot)
        message.finish(error)
        return new_home

    def fail_peer(self, peer: int, error: Exception) -> None:
        self._gone.setdefault(peer, error)
        for key in [key for key in self._conversations if key[0] == peer]:
            talk = self._conversations.pop(key)
            for send in talk.sends:
                send.finish(error)
            for receive in [*talk.receives, *([talk.arriving] if talk.arriving else [])]:
                if receive.message is not None:
                    receive.message.finish(error)
            kept = deque(receive for receive in talk.unclaimed if receive.is_complete)
            self._anyone.sender_gone(key[1], peer, len(kept))
            if kept:
                self._conversations[key] = CreditConversation(unclaimed=kept)
        for message in self._anyone.fail_peer(peer):
            message.finish(error)

    # Helpers

    def _conversation(self, peer: int, slot: int) -> CreditConversation:
        key = (peer, slot)
        talk = self._conversations.get(key)
        if talk is None:
            talk = self._conversations[key] = CreditConversation()
        return talk

    def _forget_if_over(self, peer: int, slot: int) -> None:
        talk = self._conversations.get((peer, slot))
        if talk is not None and talk.is_over():
            del self._conversations[peer, slot]

    def _tell(self, peer: int, opcode: Opcode, slot: int, nbytes: int) -> None:
        self._queue_for(peer).push(frame_header(opcode, slot, nbytes))

    def _send_data(self, message: PostedMessage, wanted_nbytes: int) -> None:
        """Answer a credit with a message. See [Note: sizes that differ]."""
        view = message.view
        assert view is not None
        if wanted_nbytes != message.nbytes:
            error = SizeMismatch(self._rank, message.peer, message.nbytes, wanted_nbytes)
            message.finish(error)
            if wanted_nbytes < message.nbytes:
                return
            view = copy_of(view)
        queue = self._queue_for(message.peer)
        queue.push(frame_header(Opcode.DATA, message.slot, message.nbytes, message.nbytes))
        queue.push_payload(view, message)
