"""Routes frames between one rank's connections on one network interface and its posted sends and
receives, without an event loop or threads.

A hub ties the parts without I/O together: for each peer a reader, a queue and a stream, and one
exchange for all. Others say when a stream is ready: the event loop, or a simulation.

[Note: changes that are broken off]
A signal's handler may raise (Ctrl-C) between any two lines of a change to what a hub or its
exchange knows. Then the group ends, and all that wait must hear of it, whatever is half changed: a
message may have left one list and not arrived in the next. So `fail_messages` does not
rely on the lists being consistent, and goes by `PostedMessage.under_way`, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from impl.transport.lent import MemoryGone
from impl.transport.messages.frames import (
    CONTROL_NBYTES_MAX,
    FrameRules,
    Opcode,
    Preamble,
    ProtocolError,
    frame_header,
)
from impl.transport.messages.matching import MessageExchange, PostedMessage
from impl.transport.messages.streams import FrameReader, Happened, SendQueue

READS_PER_EVENT = 16  # then the other peers get their turn


class ByteStream(Protocol):
    """A connected, non-blocking socket, or what a simulation has instead."""

    def recv_into(self, buffer: memoryview, /) -> int:
        """0 at the end of the stream. Raises BlockingIOError when there is nothing now."""

    def sendmsg(self, buffers: Sequence[memoryview], /) -> int: ...

    def want_write(self, wanted: bool) -> None:
        """Have `Link.on_writable` called when the stream takes bytes again, or no longer."""

    def close(self) -> None: ...


class PeerGone(Exception):
    """Why messages to or from a peer cannot end well."""

    def __init__(self, peer: int, how: str) -> None:
        super().__init__(f"rank {peer} is gone: {how}")
        self.peer = peer
        self.how = how


class HubOwner(Protocol):
    """Who is told what a hub cannot decide by itself."""

    def link_closed(self, link: Link, how: str, after_farewell: bool) -> None:
        """The peer of this link is gone. Its messages have failed already."""

    def cannot_send(self, link: Link, gone: MemoryGone) -> None:
        """What the peer of this link was promised, or its beginning, cannot be sent."""

    def on_control(self, peer: int, frame: Preamble, text: str) -> None:
        """A frame that concerns the group rather than one message."""


CONTROL_OPCODES = frozenset({Opcode.STATEMENT, Opcode.FATE, Opcode.FAREWELL})


class Link:
    """The connection to one peer."""

    __slots__ = (
        "_control",
        "_in_control",
        "_is_writing",
        "_queue",
        "_reader",
        "broke_protocol",
        "hub",
        "peer",
        "stream",
    )

    def __init__(self, hub: Hub, peer: int, stream: ByteStream, queue: SendQueue) -> None:
        self.hub = hub
        self.peer = peer
        self.stream = stream
        self._queue = queue
        self._reader = FrameReader(hub.rules)
        self._is_writing = False
        self.broke_protocol = False  # it ended because its peer broke the protocol
        self._control = bytearray()  # payload of a control frame
        self._in_control = False  # it is under way

    def on_writable(self) -> None:
        """Write what is queued, as far as the stream takes it."""
        queue = self._queue
        while queue:
            try:
                count = self.stream.sendmsg(queue.buffers())
            except MemoryGone as gone:
                self.hub.owner.cannot_send(self, gone)
                return
            except BlockingIOError:
                self._set_writing(True)
                return
            except OSError as error:
                # What the peer said before it went may still be read; the reader sees the end.
                queue.abandon(PeerGone(self.peer, describe_os_error(error)))
                break
            queue.sent(count)
        self._set_writing(False)

    def _set_writing(self, wanted: bool) -> None:
        if wanted != self._is_writing:
            self._is_writing = wanted
            self.stream.want_write(wanted)

    def on_readable(self) -> None:
        """Read what has come, and act on it."""
        for _ in range(READS_PER_EVENT):
            buffer = self._reader.buffer()
            try:
                count = self.stream.recv_into(buffer)
            except BlockingIOError:
                return
            except OSError as error:
                self.hub.drop(self, describe_os_error(error))
                return
            if count == 0:
                self.hub.drop(self, "its connection ended")
                return
            try:
                self._on_received(count)
            except ProtocolError as error:
                self.broke_protocol = True
                self.hub.drop(self, f"it broke the protocol: {error}")
                return
            if count < len(buffer) or self.hub.links.get(self.peer) is not self:
                return

    def _on_received(self, count: int) -> None:
        hub, exchange, peer = self.hub, self.hub.exchange, self.peer
        for happened, frame in self._reader.received(count):
            if frame.opcode in CONTROL_OPCODES:
                self._on_control_event(happened, frame)
            elif hub.silenced is not None:
                self.drop_payload()
            elif happened is Happened.FRAME:
                exchange.on_frame(peer, frame)
            elif happened is Happened.PAYLOAD_BEGINS:
                self._reader.place(exchange.on_payload_begins(peer, frame))
            else:
                exchange.on_payload_ends(peer, frame)

    def _on_control_event(self, happened: Happened, frame: Preamble) -> None:
        if happened is Happened.PAYLOAD_BEGINS:
            self._control = bytearray(frame.length)
            self._in_control = True
            self._reader.place(memoryview(self._control))
            return
        self._in_control = False
        if frame.opcode == Opcode.FAREWELL:
            self.hub.farewells.add(self.peer)
        text = self._control.decode(errors="replace") if happened is Happened.PAYLOAD_ENDS else ""
        self.hub.owner.on_control(self.peer, frame, text)

    @property
    def is_stuck(self) -> bool:
        """Whether the next bytes cannot be sent, since their memory is gone."""
        try:
            self._queue.buffers()
        except MemoryGone:
            return True
        return False

    def relocate(self, target: memoryview) -> None:
        if not self._reader.relocate(target):
            self.hub.drop(self, "the memory for what it was sending was freed")

    def drop_payload(self) -> None:
        """The payload under way, if there is one, is not wanted."""
        if self._reader.has_payload_under_way and not self._in_control:
            self._reader.place(None)


def describe_os_error(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


class Hub:
    """See the module. All methods are called by one thread at a time."""

    def __init__(
        self,
        peers: Sequence[int],
        rules: FrameRules,
        make_exchange: Callable[[Callable[[int], SendQueue]], MessageExchange],
        owner: HubOwner,
    ) -> None:
        self.peers = tuple(peers)
        self.rules = rules
        self.owner = owner
        self.links: dict[int, Link] = {}
        self.lost: dict[int, PeerGone] = {}
        self.farewells: set[int] = set()  # peers that said goodbye before they left
        self.silenced: Exception | None = None  # why messages are neither sent nor taken
        self._queues = {peer: SendQueue() for peer in peers}
        self._with_news: set[int] = set()  # peers for which something was queued
        self._under_way: set[PostedMessage] = set()
        self.exchange = make_exchange(self.queue_for)

    def queue_for(self, peer: int) -> SendQueue:
        """The queue for frames to `peer`, which are kept until there is a connection."""
        self._with_news.add(peer)
        return self._queues[peer]

    @property
    def has_news(self) -> bool:
        """Whether something was queued since the last `flush`."""
        return bool(self._with_news)

    def flush(self) -> None:
        """Write what has been queued since the last call."""
        while self._with_news:
            link = self.links.get(self._with_news.pop())
            if link is not None:
                link.on_writable()

    def has_unsent(self) -> bool:
        return any(self._queues[peer] for peer in self.links)

    def attach(self, peer: int, stream: ByteStream) -> Link:
        """The connection to `peer` is there. The caller then sees to what is queued for it."""
        assert peer not in self.links
        link = self.links[peer] = Link(self, peer, stream, self._queues[peer])
        return link

    def drop(self, link: Link, how: str) -> None:
        """End a connection; what its peer has or should have sent fails."""
        if self.links.get(link.peer) is not link:
            return
        del self.links[link.peer]
        link.stream.close()
        after_farewell = link.peer in self.farewells
        self.fail_peer(link.peer, "it has left the group" if after_farewell else how)
        self.owner.link_closed(link, how, after_farewell)

    def fail_peer(self, peer: int, how: str) -> None:
        """Nothing will come from `peer` or go there any more."""
        error = self.lost.setdefault(peer, PeerGone(peer, how))
        self._queues[peer].abandon(error)
        if self.silenced is None:
            self.exchange.fail_peer(peer, error)

    def post_send(self, message: PostedMessage) -> None:
        if self._accepts(message):
            self.exchange.post_send(message)

    def post_receive(self, message: PostedMessage) -> None:
        if self._accepts(message):
            self.exchange.post_receive(message)

    def post_receive_any(self, message: PostedMessage, sources: Sequence[int]) -> None:
        if self._accepts(message):
            self.exchange.post_receive_any(message, sources)

    def _accepts(self, message: PostedMessage) -> bool:
        if self.silenced is not None:
            message.finish(self.silenced)
            return False
        message.under_way = self._under_way
        self._under_way.add(message)
        return True

    def cancel(self, message: PostedMessage, error: Exception) -> None:
        """Make only one message fail. The caller may reuse its memory when this returns."""
        new_home = self.exchange.cancel(message, error)
        if new_home is not None:
            self.links[message.peer].relocate(new_home)

    def fail_messages(self, error: Exception) -> None:
        """Fail all messages and accept no more. Connections stay open for the final frames."""
        self.silenced = error
        for peer, queue in self._queues.items():
            queue.cut(error)
            self.exchange.fail_peer(peer, error)
        for message in tuple(self._under_way):
            message.finish(error)
        for link in self.links.values():
            link.drop_payload()

    def say(self, peer: int, opcode: Opcode, text: str = "") -> None:
        """Queue a frame that concerns the group."""
        data = text.encode()[:CONTROL_NBYTES_MAX]
        frame = frame_header(opcode, 0, len(data), len(data)) + data
        self.queue_for(peer).push(frame, survives=True)

    def close(self, error: Exception) -> None:
        """End all messages and connections."""
        self.fail_messages(error)
        for link in list(self.links.values()):
            link.stream.close()
        self.links.clear()
        self._with_news.clear()
