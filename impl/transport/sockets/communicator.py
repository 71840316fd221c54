"""`SocketCommunicator`: collectives and point to point over sockets, shared by both wire protocols.

`tcp.py` and `gloo_wire.py` say how the ranks meet. What happens once they have met is in
`group.py`.
"""

from __future__ import annotations

import select
import socket
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from multiprocessing import util

import torch
from torch import Tensor

from impl.transport.base import ANY_SOURCE, CallInfo, Combine, Deadline
from impl.transport.end_cause import EndCause
from impl.transport.meeting.addresses import Address
from impl.transport.meeting.interfaces import listen
from impl.transport.memory import bytes_of
from impl.transport.messages.hub import Hub
from impl.transport.messages.matching import PostedMessage
from impl.transport.messages.own_messages import OwnMessages
from impl.transport.sockets.collective_run import Collective
from impl.transport.sockets.collectives import CollectiveBuilder
from impl.transport.sockets.group import MessageGroup
from impl.transport.sockets.handshake import Handshake
from impl.transport.sockets.loop import EventLoop
from impl.transport.sockets.mesh import Mesh
from impl.transport.sockets.socket_transfer import SocketTransfer

LINGER_S = 2.0  # how long `close` waits for a peer that does not read

READ = select.EPOLLIN
READ_AND_WRITE = select.EPOLLIN | select.EPOLLOUT


class SocketStream:
    """A connected socket in a loop. See `Stream`."""

    __slots__ = ("_loop", "recv_into", "sendmsg", "sock")

    def __init__(self, sock: socket.socket, loop: EventLoop) -> None:
        self.sock = sock
        self._loop = loop
        self.recv_into: Callable[[memoryview], int] = sock.recv_into
        self.sendmsg: Callable[[Sequence[memoryview]], int] = sock.sendmsg

    def want_write(self, wanted: bool) -> None:
        self._loop.modify(self.sock.fileno(), READ_AND_WRITE if wanted else READ)

    def close(self) -> None:
        self._loop.unregister(self.sock.fileno())
        self.sock.close()


class SocketCommunicator(ABC):
    """Implements `Communicator`, except for how the ranks meet."""

    def __init__(self, group: MessageGroup, loop: EventLoop) -> None:
        self.rank = group.rank
        self.world_size = group.world_size
        self.kind = group.kind
        self._group = group
        self._loop = loop
        self._meshes: list[Mesh] = []
        self._build = CollectiveBuilder(group.rank, group.world_size, group.plans)
        self._is_closed = False
        for hub in group.hubs:
            loop.on_flush.append(hub.flush)
        loop.on_fork.append(self._close_in_child)
        loop.on_broken_off.append(group.break_off)
        # A rank that ends without closing its groups must not look like one that died. This kind of
        # finalizer also runs in children of `multiprocessing`, which know no `atexit`.
        self._finalizer = util.Finalize(
            None, _close_if_alive, args=(weakref.ref(self),), exitpriority=0
        )

    def kind_to(self, rank: int) -> str:
        return self.kind

    # Connections

    def _listen(
        self, device: int, address: Address, new_handshake: Callable[[], Handshake]
    ) -> Address:
        """Listen at an address and attach connections to the device's hub; returns the address."""
        listener, own = listen(address)

        def on_connected(peer: int, sock: socket.socket) -> None:
            self._attach(self._group.hubs[device], peer, sock)

        label = f"rank {self.rank} of group {self._group.name!r}"
        with self._loop.lock:
            self._meshes.append(
                Mesh(self._loop, listener, self.world_size - 1, new_handshake, on_connected, label)
            )
        return own

    def _attach(self, hub: Hub, peer: int, sock: socket.socket) -> None:
        if self._group.fate is not None:
            sock.close()
            return
        link = hub.attach(peer, SocketStream(sock, self._loop))

        def on_events(mask: int) -> None:
            if mask & select.EPOLLOUT:
                link.on_writable()
            if mask & ~select.EPOLLOUT:
                link.on_readable()

        self._loop.register(sock.fileno(), READ, on_events)
        link.on_writable()

    # Collectives

    def _run(self, collective: Collective, call: CallInfo, until: Deadline) -> None:
        group, run_until = self._group, self._loop.run_until
        try:
            for pending in group.steps(collective, call):
                if not run_until(pending, until.at_s):
                    raise group.time_out(call, until)
        except BaseException:
            group.interrupt(call)
            raise
        self._loop.run_deferred()

    def all_reduce(self, tensor: Tensor, combine: Combine, call: CallInfo, until: Deadline) -> None:
        self._run(self._build.all_reduce(tensor, combine), call, until)

    def reduce(
        self, tensor: Tensor, root: int, combine: Combine, call: CallInfo, until: Deadline
    ) -> None:
        self._run(self._build.reduce(tensor, root, combine), call, until)

    def broadcast(self, tensor: Tensor, root: int, call: CallInfo, until: Deadline) -> None:
        self._run(self._build.broadcast(tensor, root), call, until)

    def all_gather(self, output: Tensor, input: Tensor, call: CallInfo, until: Deadline) -> None:
        self._run(self._build.all_gather(output, input), call, until)

    def all_gather_v(
        self, outputs: Sequence[Tensor], input: Tensor, call: CallInfo, until: Deadline
    ) -> None:
        self._run(self._build.all_gather_v(outputs, input), call, until)

    def reduce_scatter(
        self, output: Tensor, input: Tensor, combine: Combine, call: CallInfo, until: Deadline
    ) -> None:
        self._run(self._build.reduce_scatter(output, input, combine), call, until)

    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        call: CallInfo,
        until: Deadline,
    ) -> None:
        sent, wanted = input_splits[self.rank], output_splits[self.rank]
        if sent != wanted:
            raise self._group.own_splits_differ(sent, wanted, call)
        if self._group.compares_splits:
            self._compare_splits(input_splits, output_splits, call, until)
        collective = self._build.all_to_all(output, input, output_splits, input_splits)
        self._run(collective, call, until)

    def _compare_splits(
        self,
        input_splits: Sequence[int],
        output_splits: Sequence[int],
        call: CallInfo,
        until: Deadline,
    ) -> None:
        """Before any tensor changes: raise on every rank unless all ranks' splits fit together."""
        own = torch.tensor([*input_splits, *output_splits], device="cpu")
        tables = own.new_empty(self.world_size, 2, self.world_size)
        self.all_gather(tables.view(-1), own, call, until)
        sent, expected = tables[:, 0], tables[:, 1].T
        for source, target in (sent != expected).nonzero().tolist():
            text = (
                f"{self._group.where(call)}: rank {source} sends {sent[source, target]} elements "
                f"to rank {target}, which expects {expected[source, target]}."
            )
            raise self._group.give_up(EndCause.MISMATCH, text, call)

    def gather(
        self,
        outputs: Sequence[Tensor] | None,
        input: Tensor,
        root: int,
        call: CallInfo,
        until: Deadline,
    ) -> None:
        self._run(self._build.gather(outputs, input, root), call, until)

    def scatter(
        self,
        output: Tensor,
        inputs: Sequence[Tensor] | None,
        root: int,
        call: CallInfo,
        until: Deadline,
    ) -> None:
        self._run(self._build.scatter(output, inputs, root), call, until)

    def barrier(self, call: CallInfo, until: Deadline) -> None:
        self._run(self._build.barrier(), call, until)

    # Point to point

    def control_tag(self, number: int) -> int:
        return self._group.control_tag(number)

    def post_send(
        self, tensor: Tensor, dst: int, tag: int, call: CallInfo, until: Deadline
    ) -> SocketTransfer:
        """Raises the group's error after its end, and ValueError if a rank cannot reach itself."""
        return self._post(_post_send, tensor, dst, tag, call, until)

    def post_recv(
        self, tensor: Tensor, src: int, tag: int, call: CallInfo, until: Deadline
    ) -> SocketTransfer:
        """Raises as `post_send` does."""
        post = _post_receive_any if src == ANY_SOURCE else _post_receive
        return self._post(post, tensor, src, tag, call, until)

    def _post(
        self,
        post: Callable[[Hub | OwnMessages, PostedMessage], None],
        tensor: Tensor,
        peer: int,
        tag: int,
        call: CallInfo,
        until: Deadline,
    ) -> SocketTransfer:
        group = self._group
        group.raise_fate(call)
        message = PostedMessage(peer, group.slot_of_tag(tag), bytes_of(tensor))
        way: Hub | OwnMessages
        if peer == self.rank:
            way = group.own_messages(call)
        else:
            self._before_messages(group.peers if peer == ANY_SOURCE else [peer], until)
            way = group.hubs[tag % len(group.hubs)]
        transfer = SocketTransfer(
            self._loop,
            way,
            message,
            tensor,
            explain=lambda message: group.explain_message(message, call, until),
        )
        transfer.start(lambda message: post(way, message), until)
        return transfer

    @abstractmethod
    def _before_messages(self, peers: Sequence[int], until: Deadline) -> None:
        """Make sure that there is or will be a connection to these peers."""

    # The end

    def abort(self, reason: str) -> None:
        if not self._is_closed:
            group = self._group
            text = f"{group.where(None)} was aborted on rank {self.rank}: {reason}."
            group.give_up(EndCause.ABORT, text)

    def close(self) -> None:
        with self._loop.lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._group.say_goodbye()
        self._loop.run_until(_EverythingSent(self._group.hubs), self._loop.now() + LINGER_S)
        with self._loop.lock:
            for mesh in self._meshes:
                mesh.close()
            self._group.close()
        self._loop.run_deferred()
        self._loop.close()
        self._finalizer.cancel()

    def _close_in_child(self) -> None:
        """After a fork: close the copies of the parent's descriptors, and touch nothing else."""
        self._is_closed = True
        self._group.disown()
        for hub in self._group.hubs:
            for link in hub.links.values():
                assert isinstance(link.stream, SocketStream)
                link.stream.sock.close()
        for mesh in self._meshes:
            mesh.abandon()


def _post_send(way: Hub | OwnMessages, message: PostedMessage) -> None:
    way.post_send(message)


def _post_receive(way: Hub | OwnMessages, message: PostedMessage) -> None:
    way.post_receive(message)


def _post_receive_any(way: Hub | OwnMessages, message: PostedMessage) -> None:
    assert isinstance(way, Hub)
    way.post_receive_any(message, way.peers)


class _EverythingSent:
    """Nothing is queued any more. (The loop's `Pending`.)"""

    def __init__(self, hubs: Sequence[Hub]) -> None:
        self._hubs = hubs

    @property
    def done(self) -> bool:
        return not any(hub.has_unsent() for hub in self._hubs)


def _close_if_alive(reference: weakref.ref[SocketCommunicator]) -> None:
    communicator = reference()
    if communicator is not None:
        communicator.close()
