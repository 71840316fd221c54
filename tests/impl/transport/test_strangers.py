"""Strangers that connect to a rank's port: the group goes on, and each gets one line in the log."""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
import torch.distributed as dist

from impl import errors
from impl.transport.base import Communicator
from impl.transport.meeting.addresses import Address, decode_value
from impl.transport.meeting.interfaces import listen
from impl.transport.messages.frames import PREAMBLE, Opcode
from impl.transport.sockets import mesh
from impl.transport.sockets.handshake import (
    MAGIC,
    AuthenticatedCaller,
    Credentials,
    GlooListener,
    Handshake,
)
from impl.transport.sockets.loop import EventLoop
from tests.impl.transport.combines import SUM
from tests.impl.transport.ranks import MODES, PATIENCE_S, Calls, connected, run_ranks, soon

KEYS = {"tcp": "tcp/0/{}", "gloo": "0/{}"}


class Visitors:
    """Connections to a rank's port that are no members'. They stay open until the end."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    def call(self, address: Address, data: bytes = b"", close: bool = False) -> socket.socket:
        sock = socket.create_connection(address.endpoint[:2], timeout=PATIENCE_S)
        self._sockets.append(sock)
        sock.sendall(data)
        if close:
            sock.close()
        return sock

    def leave(self) -> None:
        for sock in self._sockets:
            sock.close()


Visit = Callable[[Visitors, Address], object]


class LogBook(logging.Handler):
    """Lines of the log, and waiting until there are enough of them."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._more = threading.Condition()

    def emit(self, record: logging.LogRecord) -> None:
        with self._more:
            self.lines.append(record.getMessage())
            self._more.notify_all()

    def of(self, rank: int) -> list[str]:
        begin = f"rank {rank} of group 'test': dropped a connection"
        return [line for line in self.lines if line.startswith(begin)]

    def wait_for(self, count: int, ranks: Sequence[int] = (0, 1)) -> None:
        """Until these ranks have written so many lines. Fails if they do not."""
        with self._more:
            enough = self._more.wait_for(
                lambda: all(len(self.of(rank)) >= count for rank in ranks), PATIENCE_S
            )
        assert enough, self.lines


@pytest.fixture
def log_book() -> Iterator[LogBook]:
    book = LogBook()
    logger = logging.getLogger("impl.transport")
    logger.addHandler(book)
    yield book
    logger.removeHandler(book)


def visit(mode: str, how: Visit, lines: int, log_book: LogBook) -> list[str]:
    """Visit ranks 0 and 1 while they wait for rank 2, and see the group work: what was logged."""
    store = dist.HashStore()
    visitors = Visitors()
    visited = threading.Event()

    def rank_function(rank: int) -> None:
        if rank == 2:
            assert visited.wait(PATIENCE_S)
        with connected(mode, store, rank, 3) as comm:
            work(comm, Calls())

    def visitor() -> None:
        try:
            for rank in range(2):
                how(visitors, address_of(mode, store, rank, 3))
            log_book.wait_for(lines)
        finally:
            visited.set()

    run_ranks(4, lambda rank: visitor() if rank == 3 else rank_function(rank))
    visitors.leave()
    for rank in range(2):
        assert len(log_book.of(rank)) == lines, log_book.lines
    return log_book.lines


def address_of(mode: str, store: dist.Store, rank: int, world_size: int) -> Address:
    return decode_value(store.get(KEYS[mode].format(rank)), world_size).address


def work(comm: Communicator, calls: Calls) -> None:
    x = torch.ones(5000)
    comm.all_reduce(x, SUM, calls("all_reduce"), soon())
    assert x.unique().tolist() == [comm.world_size]


@MODES
def test_the_port_is_closed_when_all_are_connected(mode: str, log_book: LogBook) -> None:
    store = dist.HashStore()

    def rank_function(rank: int) -> bool:
        with connected(mode, store, rank, 2) as comm:
            work(comm, Calls())
            try:
                Visitors().call(address_of(mode, store, rank, 2))
            except ConnectionRefusedError:
                return True
            return False

    assert run_ranks(2, rank_function) == [True, True]
    assert not log_book.lines


def say(data: bytes, close: bool = False) -> Visit:
    return lambda visitors, address: visitors.call(address, data, close)


@MODES
@pytest.mark.parametrize("seed", range(3))
def test_random_bytes(mode: str, seed: int, log_book: LogBook) -> None:
    data = bytes([0x80 | seed]) * 8 + os.urandom(5000)
    visit(mode, say(data), 1, log_book)


@MODES
def test_a_web_browser(mode: str, log_book: LogBook) -> None:
    request = b"GET / HTTP/1.1\r\nHost: example\r\n\r\n"
    visit(mode, say(request), 1, log_book)


@MODES
@pytest.mark.parametrize("data", [b"", b"abc"])
def test_half_a_handshake_and_good_bye(mode: str, data: bytes, log_book: LogBook) -> None:
    texts = visit(mode, say(data, close=True), 1, log_book)
    assert any("before it had said who it is" in text for text in texts)


@MODES
def test_a_caller_that_stays_silent(
    mode: str, log_book: LogBook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh, "HANDSHAKE_LIMIT_S", 2.0)
    texts = visit(mode, say(b"abc"), 1, log_book)
    assert any("silent for 2 s" in text for text in texts)


@MODES
def test_200_idle_connections(
    mode: str, log_book: LogBook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh, "HALF_OPEN_MAX", 150)

    def crowd(visitors: Visitors, address: Address) -> None:
        for _ in range(200):
            visitors.call(address)

    texts = visit(mode, crowd, mesh.LOGGED_MAX, log_book)
    assert any("too many" in text for text in texts)
    assert "no further ones are logged" in texts[-1]


def test_a_stream_of_callers_leaves_the_members_their_turn() -> None:
    listener, address = listen(Address(socket.AF_INET, "127.0.0.1", 0))
    loop = EventLoop("test")
    accepted = 0

    def greeted() -> Handshake:
        nonlocal accepted
        accepted += 1
        return GlooListener(0, 2)

    visitors = Visitors()
    with loop.lock:
        hosting = mesh.Mesh(loop, listener, 1, greeted, lambda peer, sock: None, "test")
        for _ in range(mesh.ACCEPTS_PER_EVENT + 4):
            visitors.call(address)
        seen = []
        for _ in range(2):
            hosting._on_accept(select.EPOLLIN)
            seen.append(accepted)
        hosting.close()
    visitors.leave()
    loop.close()
    assert seen == [mesh.ACCEPTS_PER_EVENT, mesh.ACCEPTS_PER_EVENT + 4]


def test_a_wrong_secret(log_book: LogBook) -> None:
    def try_secret(visitors: Visitors, address: Address) -> None:
        stranger = AuthenticatedCaller(Credentials(b"guess" * 8, 0, 2, 0), peer=1)
        sock = visitors.call(address, stranger.start())
        challenge = sock.recv(stranger.needed, socket.MSG_WAITALL)
        sock.sendall(stranger.receive(challenge))

    texts = visit("tcp", try_secret, 1, log_book)
    assert any("does not know the secret" in text for text in texts)


def test_half_an_authenticated_handshake(log_book: LogBook) -> None:
    visit("tcp", say(MAGIC + bytes(40), close=True), 1, log_book)


@pytest.mark.parametrize("greeting", [0, 1])
def test_gloo_s_greeting_of_a_rank_that_is_connected(greeting: int, log_book: LogBook) -> None:
    """The right number, but too late. (Before the real peer it would do: Gloo has no secret.)"""
    listener, address = listen(Address(socket.AF_INET, "127.0.0.1", 0))
    loop = EventLoop("test")
    visitors = Visitors()
    connected_to: list[int] = []

    def on_connected(peer: int, sock: socket.socket) -> None:
        connected_to.append(peer)
        sock.close()

    label = "rank 2 of group 'test'"
    with loop.lock:
        hosting = mesh.Mesh(loop, listener, 2, lambda: GlooListener(2, 3), on_connected, label)
    for _ in range(2):
        visitors.call(address, greeting.to_bytes(8, "little"))
    log_book.wait_for(1, ranks=[2])
    with loop.lock:
        hosting.close()
    visitors.leave()
    loop.close()
    assert connected_to == [greeting]
    assert f"rank {greeting} is connected already" in log_book.lines[0]


# Members of the group that break the rules


@MODES
def test_a_huge_length_costs_the_connection_and_one_line(mode: str, log_book: LogBook) -> None:
    """A member that sends nonsense is lost, as if it had died. The process goes on."""
    store = dist.HashStore()

    def rank_function(rank: int) -> type[BaseException] | None:
        with connected(mode, store, rank, 2) as comm:
            calls = Calls()
            if rank == 0:
                send_rubbish(comm)
            try:
                for _ in range(1000):
                    work(comm, calls)
            except errors.PeerLost as error:
                return type(error)
        return None

    results = run_ranks(2, rank_function)
    assert results == [errors.PeerLost] * 2
    assert len([line for line in log_book.lines if "broke the protocol" in line]) == 1


def send_rubbish(comm: Communicator) -> None:
    group = comm._group  # type: ignore[attr-defined]  # a member gone mad has no public interface
    with group.loop.lock:
        huge = PREAMBLE.pack((1 << 63) + 48, Opcode.DATA, 12345, 0, 1 << 63, 0)
        group.hubs[0].queue_for(1).push(huge)
        group.hubs[0].flush()
