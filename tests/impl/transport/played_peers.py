"""A rank's message exchange (`impl.transport.messages`) in a test that plays all of its peers."""

from __future__ import annotations

from collections.abc import Callable

from impl.transport.messages.credits import CreditExchange
from impl.transport.messages.eager import EagerExchange
from impl.transport.messages.frames import PREAMBLE, PREAMBLE_NBYTES, Opcode, Preamble
from impl.transport.messages.hub import Hub
from impl.transport.messages.matching import MessageExchange, PostedMessage
from impl.transport.messages.streams import SendQueue


class Desk:
    """One rank's exchange, with the test in place of its peers."""

    def __init__(
        self, make: Callable[[Callable[[int], SendQueue]], CreditExchange | EagerExchange]
    ) -> None:
        self.queues: dict[int, SendQueue] = {}
        self.exchange: MessageExchange = make(
            lambda peer: self.queues.setdefault(peer, SendQueue())
        )
        self.way: MessageExchange | Hub = self.exchange  # that messages go

    def send(self, peer: int, slot: int, data: bytes) -> PostedMessage:
        message = PostedMessage(peer, slot, memoryview(bytearray(data)))
        self.way.post_send(message)
        return message

    def receive(self, peer: int, slot: int, nbytes: int) -> PostedMessage:
        message = PostedMessage(peer, slot, memoryview(bytearray(nbytes)))
        self.way.post_receive(message)
        return message

    def receive_any(self, slot: int, nbytes: int, *sources: int) -> PostedMessage:
        message = PostedMessage(-1, slot, memoryview(bytearray(nbytes)))
        self.way.post_receive_any(message, sources)
        return message

    def said(self, peer: int) -> list[tuple[str, int]]:
        """(opcode, length) of the frames for a peer since the last call; they count as written."""
        queue = self.queues.get(peer, SendQueue())
        data = b"".join(queue.buffers())
        queue.sent(len(data))
        frames = []
        while data:
            preamble = Preamble._make(PREAMBLE.unpack_from(data))
            frames.append((Opcode(preamble.opcode).name, preamble.length))
            data = data[preamble.nbytes :]
        return frames

    def hear(self, peer: int, opcode: Opcode, slot: int, length: int) -> None:
        self.exchange.on_frame(peer, Preamble(PREAMBLE_NBYTES, opcode, slot, 0, length, 0))

    def hear_data(self, peer: int, slot: int, data: bytes, opcode: Opcode = Opcode.DATA) -> None:
        nbytes = PREAMBLE_NBYTES + len(data)
        frame = Preamble(nbytes, opcode, slot, 0, len(data), 0)
        target = self.exchange.on_payload_begins(peer, frame)
        if target is not None:
            target[:] = data
        self.exchange.on_payload_ends(peer, frame)
