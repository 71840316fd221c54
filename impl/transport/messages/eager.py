"""The eager and rendezvous protocols of messages over authenticated TCP.

[Note: eager and announced messages]
A message of up to EAGER_NBYTES_MAX bytes is sent without asking, as long as the receiver has
room: up to WINDOW_NBYTES of messages that it has not yet consumed, for each peer. It is one frame
and half a round trip, where Gloo needs three frames and, if the receive comes late, one and a
half round trips. All other messages are announced (SEND_READY), wanted (RECV_READY) and sent
(DATA).

Point to point, a receiver asks for a message when it has both the announcement and a receive. In
a collective both ranks know what comes, so a large receive asks at once and its data are under
way as soon as the sender has them. The window does not apply to collectives: they are in lock
step, so a peer can be at most one call ahead.

    event                    point to point                      collective
    small send               EAGER, or as a large one            EAGER
    large send               SEND_READY; queue it                SEND_READY; DATA if wanted,
                                                                   else queue it
    small receive            take what has come, or queue it     the same
    large receive            the same, RECV_READY                RECV_READY; queue it
                               when announced
    RECV_READY arrives       DATA of the first that is queued    the same, or keep it

First frames (EAGER, SEND_READY) stand for their messages and arrive in the order of the sends, so
the n-th one meets the n-th receive. DATA follow in the order of RECV_READY.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from impl.transport.lent import copy_of
from impl.transport.messages.frames import (
    EAGER_NBYTES_MAX,
    PREAMBLE_NBYTES,
    Opcode,
    Preamble,
    ProtocolError,
    frame_header,
)
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

WINDOW_NBYTES = 1 << 20
COLLECTIVE_SLOT = 1 << 63  # one for all: collectives of a group follow one another


@dataclass(slots=True, eq=False)
class Arrival:
    """A message without a matching receive so far: announced, or already received."""

    receive: PendingReceive  # stands for one that is to come
    is_eager: bool


@dataclass(slots=True)
class EagerConversation:
    """What one rank knows of one (peer, slot). Empty ones are forgotten."""

    receives: deque[PendingReceive] = field(default_factory=deque)  # that have met no message
    arrivals: deque[Arrival] = field(default_factory=deque)  # that have met no receive
    asked: deque[PendingReceive] = field(
        default_factory=deque
    )  # RECV_READY has gone out, no data yet
    unclaimed: deque[PendingReceive] = field(
        default_factory=deque
    )  # asked, but the message was cancelled
    sends: deque[PostedMessage] = field(default_factory=deque)  # announced and not yet wanted
    wanted: deque[int] = field(default_factory=deque)  # sizes that the peer wants too early
    arriving: PendingReceive | None = None  # whose payload is under way

    def is_over(self) -> bool:
        return not (
            self.receives
            or self.arrivals
            or self.asked
            or self.unclaimed
            or self.sends
            or self.wanted
            or self.arriving
        )


def eager_cost(nbytes: int) -> int:
    """The share of the window that a message takes, preamble included: empty ones cost too."""
    return PREAMBLE_NBYTES + nbytes


class EagerExchange:
    """The authenticated mode's protocol for one rank on one device. See `Exchange`."""

    def __init__(
        self,
        rank: int,
        queue_for: Callable[[int], SendQueue],
        on_call: Callable[[int, int], None],
    ) -> None:
        """`on_call(peer, call)` hears of the call number in every frame of a collective."""
        self._rank = rank
        self._queue_for = queue_for
        self._on_call = on_call
        self._conversations: dict[tuple[int, int], EagerConversation] = {}
        self._anyone = AnySource()
        self._gone: dict[int, Exception] = {}  # peers that have left or died
        self._in_flight: dict[int, int] = {}  # peer -> bytes of its window that we have used
        self._held: dict[int, int] = {}  # peer -> bytes of our window that it has used
        self._consumed: dict[int, int] = {}  # peer -> bytes of these that it can have back
        self.call = 0  # the call number that our own frames carry
        self.told: set[int] = set()  # peers that have got a frame with this number

    # Posting

    def begin_call(self, call: int) -> None:
        self.call = call
        self.told.clear()

    def tell_call(self, peer: int) -> None:
        """Make sure that `peer` has got a frame of the present call."""
        if peer not in self.told:
            self._put(peer, Opcode.TOKEN, COLLECTIVE_SLOT, 0)

    def post_send(self, message: PostedMessage) -> None:
        peer, slot, view = message.peer, message.slot, message.view
        assert view is not None
        if peer in self._gone:
            message.finish(self._gone[peer])
            return
        if message.nbytes <= EAGER_NBYTES_MAX and self._has_room(peer, slot, message.nbytes):
            self._put(peer, Opcode.EAGER, slot, message.nbytes, bytes(view))
            message.finish()
            return
        self._put(peer, Opcode.SEND_READY, slot, message.nbytes)
        talk = self._conversation(peer, slot)
        if talk.wanted:
            self._send_data(message, wanted_nbytes=talk.wanted.popleft())
            self._forget_if_over(peer, slot)
        else:
            talk.sends.append(message)

    def post_receive(self, message: PostedMessage) -> None:
        peer, slot = message.peer, message.slot
        talk = self._conversation(peer, slot)
        if talk.unclaimed:
            self._anyone.sender_served(slot, peer)
            take_over(talk.unclaimed.popleft(), message, self._rank)
        elif talk.arrivals:
            arrival = talk.arrivals.popleft()
            receive = arrival.receive
            sent_nbytes = receive.nbytes
            self._anyone.sender_served(slot, peer)
            if arrival.is_eager:
                take_over(receive, message, self._rank)
                self._consume(peer, slot, sent_nbytes)
            else:
                receive.nbytes, receive.message = message.nbytes, message
                self._meet_announced(peer, slot, receive, sent_nbytes)
        elif peer in self._gone:
            message.finish(self._gone[peer])
        else:
            receive = PendingReceive(message.nbytes, message)
            talk.receives.append(receive)
            if slot == COLLECTIVE_SLOT and message.nbytes > EAGER_NBYTES_MAX:
                self._ask(peer, slot, receive)
            return
        self._forget_if_over(peer, slot)

    def post_receive_any(self, message: PostedMessage, sources: Sequence[int]) -> None:
        if self._anyone.find_sender(message, sources):
            self.post_receive(message)

    def _has_room(self, peer: int, slot: int, nbytes: int) -> bool:
        if slot == COLLECTIVE_SLOT:
            return True
        used = self._in_flight.get(peer, 0) + eager_cost(nbytes)
        if used > WINDOW_NBYTES:
            return False
        self._in_flight[peer] = used
        return True

    def _consume(self, peer: int, slot: int, nbytes: int) -> None:
        """Give the peer its room back, in few frames."""
        if slot == COLLECTIVE_SLOT:
            return
        consumed = self._consumed.get(peer, 0) + eager_cost(nbytes)
        if consumed >= WINDOW_NBYTES // 4:
            self._put(peer, Opcode.CONSUMED, slot, consumed)
            self._held[peer] -= consumed
            consumed = 0
        self._consumed[peer] = consumed

    def _hold(self, peer: int, slot: int, nbytes: int) -> None:
        """An eager message comes. Raises ProtocolError if the peer has no room for it left."""
        if slot == COLLECTIVE_SLOT:
            return
        held = self._held.get(peer, 0) + eager_cost(nbytes)
        if held > WINDOW_NBYTES:
            raise ProtocolError(
                f"{nbytes} bytes on slot {slot:#x} without asking, which makes {held} that are not"
                f" consumed; {WINDOW_NBYTES} is the most"
            )
        self._held[peer] = held

    def _ask(self, peer: int, slot: int, receive: PendingReceive) -> None:
        self._put(peer, Opcode.RECV_READY, slot, receive.nbytes)
        self._conversation(peer, slot).asked.append(receive)

    def _meet_announced(
        self, peer: int, slot: int, receive: PendingReceive, sent_nbytes: int
    ) -> None:
        """A receive has met an announcement. RECV_READY tells the sender of a wrong size."""
        talk = self._conversation(peer, slot)
        if receive not in talk.asked:
            self._ask(peer, slot, receive)
        if sent_nbytes != receive.nbytes:
            talk.asked.remove(receive)
            assert receive.message is not None
            receive.message.finish(SizeMismatch(peer, self._rank, sent_nbytes, receive.nbytes))

    # What arrives

    def on_frame(self, peer: int, frame: Preamble) -> None:
        slot = frame.slot
        if slot == COLLECTIVE_SLOT:
            self._on_call(peer, frame.offset << 32 | frame.roffset)
        if frame.opcode == Opcode.SEND_READY:
            self._on_announced(peer, slot, frame.length)
        elif frame.opcode == Opcode.RECV_READY:
            self._on_wanted(peer, slot, frame.length)
        elif frame.opcode == Opcode.CONSUMED:
            left = self._in_flight.get(peer, 0) - frame.length
            if left < 0:
                raise ProtocolError(f"{frame.length} bytes consumed, more than were sent")
            self._in_flight[peer] = left

    def _on_announced(self, peer: int, slot: int, nbytes: int) -> None:
        talk = self._conversation(peer, slot)
        if talk.receives:
            self._meet_announced(peer, slot, talk.receives.popleft(), nbytes)
            self._forget_if_over(peer, slot)
            return
        talk.arrivals.append(Arrival(PendingReceive(nbytes, None), is_eager=False))
        self._offer_to_anyone(peer, slot)

    def _on_wanted(self, peer: int, slot: int, nbytes: int) -> None:
        talk = self._conversation(peer, slot)
        if talk.sends:
            self._send_data(talk.sends.popleft(), wanted_nbytes=nbytes)
            self._forget_if_over(peer, slot)
        elif slot == COLLECTIVE_SLOT:
            talk.wanted.append(nbytes)
        else:
            raise ProtocolError(f"slot {slot:#x} asked for a message that was not announced")

    def on_payload_begins(self, peer: int, frame: Preamble) -> memoryview | None:
        if frame.slot == COLLECTIVE_SLOT:
            self._on_call(peer, frame.offset << 32 | frame.roffset)
        if frame.opcode == Opcode.EAGER:
            self._hold(peer, frame.slot, frame.length)
        talk = self._conversation(peer, frame.slot)
        if frame.opcode == Opcode.DATA:
            if not talk.asked:
                raise ProtocolError(f"data on slot {frame.slot:#x}, for which nothing was asked")
            receive = talk.asked.popleft()
            if frame.length != receive.nbytes:
                raise ProtocolError(f"{frame.length} bytes of data, asked were {receive.nbytes}")
        elif talk.receives:
            receive = talk.receives.popleft()
            self._consume(peer, frame.slot, frame.length)
            if frame.length != receive.nbytes:
                error = SizeMismatch(peer, self._rank, frame.length, receive.nbytes)
                assert receive.message is not None
                receive.message.finish(error)
                receive = PendingReceive(frame.length, None)
        else:
            # before the offer, which forgets conversations that are over
            receive = talk.arriving = PendingReceive(frame.length, None)
            talk.arrivals.append(Arrival(receive, is_eager=True))
            self._offer_to_anyone(peer, frame.slot)
        talk.arriving = receive
        return memory_for(receive)

    def on_payload_ends(self, peer: int, frame: Preamble) -> None:
        talk = self._conversation(peer, frame.slot)
        receive, talk.arriving = talk.arriving, None
        assert receive is not None
        complete(receive)
        self._forget_if_over(peer, frame.slot)

    def _offer_to_anyone(self, peer: int, slot: int) -> None:
        message = self._anyone.sender_waits(slot, peer)
        if message is not None:
            self.post_receive(message)

    # Failures

    def cancel(self, message: PostedMessage, error: Exception) -> memoryview | None:
        if message.done:
            return None
        new_home = None
        if message.peer < 0:
            self._anyone.forget(message)
        else:
            self._queue_for(message.peer).detach(message)
            talk = self._conversation(message.peer, message.slot)
            if message in talk.sends:
                assert message.view is not None
                message.view = copy_of(message.view)
            # No peer has been told of a receive that has met no message: it leaves no trace.
            for receive in list(talk.receives):
                if receive.message is message:
                    talk.receives.remove(receive)
            arriving = talk.arriving
            moves = arriving is not None and arriving.message is message
            told = in_order([*talk.asked, *([arriving] if arriving else [])])
            vacant = vacate(told, message)
            if vacant is not None:
                self._leave(message.peer, message.slot, vacant)
            if moves and arriving is not None and arriving.arrived is None:
                new_home = memory_for(arriving)
            self._forget_if_over(message.peer, message.slot)
        message.finish(error)
        return new_home

    def _leave(self, peer: int, slot: int, vacant: PendingReceive) -> None:
        """A requested receive has lost its message: choose who takes the payload that arrives."""
        talk = self._conversation(peer, slot)
        if talk.receives and talk.receives[0].nbytes == vacant.nbytes:
            vacant.message = talk.receives.popleft().message
        else:
            talk.unclaimed = in_order([*talk.unclaimed, vacant])
            self._offer_to_anyone(peer, slot)

    def fail_peer(self, peer: int, error: Exception) -> None:
        self._gone.setdefault(peer, error)
        for key in [key for key in self._conversations if key[0] == peer]:
            talk = self._conversations.pop(key)
            for send in talk.sends:
                send.finish(error)
            under_way = [talk.arriving] if talk.arriving else []
            for receive in [*talk.receives, *talk.asked, *under_way]:
                if receive.message is not None:
                    receive.message.finish(error)
            # What has come in full is still there for a later receive.
            unclaimed = deque(receive for receive in talk.unclaimed if receive.is_complete)
            kept = [each for each in talk.arrivals if each.receive.is_complete]
            self._anyone.sender_gone(key[1], peer, len(kept) + len(unclaimed))
            if kept or unclaimed:
                self._conversations[key] = EagerConversation(
                    arrivals=deque(kept), unclaimed=unclaimed
                )
        for message in self._anyone.fail_peer(peer):
            message.finish(error)

    # Helpers

    def _conversation(self, peer: int, slot: int) -> EagerConversation:
        key = (peer, slot)
        talk = self._conversations.get(key)
        if talk is None:
            talk = self._conversations[key] = EagerConversation()
        return talk

    def _forget_if_over(self, peer: int, slot: int) -> None:
        talk = self._conversations.get((peer, slot))
        # The conversation of the collectives is never over for long.
        if talk is not None and slot != COLLECTIVE_SLOT and talk.is_over():
            del self._conversations[peer, slot]

    def _put(self, peer: int, opcode: Opcode, slot: int, length: int, payload: bytes = b"") -> None:
        header = self._header(peer, opcode, slot, length, len(payload))
        self._queue_for(peer).push(header + payload)

    def _header(
        self, peer: int, opcode: Opcode, slot: int, length: int, payload_nbytes: int
    ) -> bytes:
        if slot != COLLECTIVE_SLOT:
            return frame_header(opcode, slot, length, payload_nbytes)
        self.told.add(peer)
        index, digest = self.call >> 32, self.call & 0xFFFFFFFF
        return frame_header(opcode, slot, length, payload_nbytes, index, digest)

    def _send_data(self, message: PostedMessage, wanted_nbytes: int) -> None:
        view = message.view
        assert view is not None
        if wanted_nbytes != message.nbytes:
            message.finish(SizeMismatch(self._rank, message.peer, message.nbytes, wanted_nbytes))
            return
        queue = self._queue_for(message.peer)
        queue.push(
            self._header(message.peer, Opcode.DATA, message.slot, message.nbytes, message.nbytes)
        )
        queue.push_payload(view, message)
