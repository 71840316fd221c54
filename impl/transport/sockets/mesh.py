"""One rank's connections, made on its event loop: accepts callers, dials peers until they answer,
and keeps those that complete the handshake.

[Note: strangers]
The port of a rank is open to every program that finds it. A connection counts for nothing until its
handshake is complete: it may be silent for HANDSHAKE_LIMIT_S, there may be HALF_OPEN_MAX of them,
and whatever goes wrong with one costs that one, with one line in the log, up to LOGGED_MAX. When
all ranks are connected, the port is closed.
"""

from __future__ import annotations

import errno
import logging
import select
import socket
from collections.abc import Callable
from dataclasses import dataclass

from impl.transport.meeting.addresses import Address
from impl.transport.sockets.handshake import Handshake, HandshakeError
from impl.transport.sockets.loop import EventLoop, Timer

logger = logging.getLogger(__name__)

HANDSHAKE_LIMIT_S = 10.0
HALF_OPEN_MAX = 256
LOGGED_MAX = 20  # dropped connections
ACCEPTS_PER_EVENT = 16  # then the members of the group get their turn
FIRST_PAUSE_S = 0.01  # between two attempts to connect; doubles each time
LONGEST_PAUSE_S = 1.0
ACCEPT_PAUSE_S = 0.1  # when there are no descriptors left

# A host that loses power says no goodbye. Probes find out after about 6 seconds on an idle
# connection; data that are not acknowledged end the connection after USER_TIMEOUT_MS.
KEEPALIVE_OPTIONS = (
    (socket.TCP_KEEPIDLE, 2),
    (socket.TCP_KEEPINTVL, 1),
    (socket.TCP_KEEPCNT, 4),
)
USER_TIMEOUT_MS = 20_000


def prepare_socket(sock: socket.socket) -> None:
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE_OPTIONS:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)


_CLOSED = "it closed the connection before it had said who it is"


def _how(error: OSError) -> str:
    """Which of the three comes first, an end, a reset or a broken pipe, is a matter of chance."""
    if isinstance(error, ConnectionResetError | BrokenPipeError):
        return _CLOSED
    return error.strerror or str(error)


class _RunningHandshake:
    """One handshake on one socket. Ends by `on_done(peer)` or `on_failed(why)`, once."""

    def __init__(
        self,
        loop: EventLoop,
        sock: socket.socket,
        handshake: Handshake,
        on_done: Callable[[socket.socket, int], None],
        on_failed: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._sock = sock
        self._handshake = handshake
        self._on_done = on_done
        self._on_failed = on_failed
        self._received = b""
        self._timer = loop.call_at(loop.now() + HANDSHAKE_LIMIT_S, self._on_silence)
        loop.register(sock.fileno(), select.EPOLLIN, self._on_events)

    def begin(self) -> None:
        if self._say(self._handshake.start()):
            self._finish_if_complete()

    def end(self) -> None:
        """Without a result: the mesh is being closed."""
        self._let_go()
        self._sock.close()

    def abandon(self) -> None:
        """In a forked child."""
        self._sock.close()

    def _say(self, data: bytes) -> bool:
        try:
            if data and self._sock.send(data) != len(data):
                # The first hundred bytes on a connection always fit, unless something is wrong.
                raise BlockingIOError(errno.EAGAIN, "it does not read")
        except OSError as error:
            self._fail(_how(error))
            return False
        return True

    def _on_events(self, _: int) -> None:
        try:
            data = self._sock.recv(self._handshake.needed - len(self._received))
        except BlockingIOError:
            return
        except OSError as error:
            self._fail(_how(error))
            return
        if not data:
            self._fail(_CLOSED)
            return
        self._received += data
        if len(self._received) < self._handshake.needed:
            return
        try:
            answer = self._handshake.receive(self._received)
        except HandshakeError as error:
            self._fail(str(error))
            return
        self._received = b""
        if self._say(answer):
            self._finish_if_complete()

    def _finish_if_complete(self) -> None:
        if self._handshake.needed == 0:
            self._let_go()
            self._on_done(self._sock, self._handshake.peer)

    def _on_silence(self) -> None:
        self._fail(f"it was silent for {HANDSHAKE_LIMIT_S:g} s")

    def _fail(self, why: str) -> None:
        self.end()
        self._on_failed(why)

    def _let_go(self) -> None:
        self._timer.cancel()
        self._loop.unregister(self._sock.fileno())


class _Dialler:
    """Tries to connect to one peer, repeatedly until it is closed."""

    def __init__(
        self,
        mesh: Mesh,
        peer: int,
        address: Address,
        new_handshake: Callable[[], Handshake],
    ) -> None:
        self._mesh = mesh
        self._peer = peer
        self._address = address
        self._new_handshake = new_handshake
        self._pause_s = FIRST_PAUSE_S
        self._sock: socket.socket | None = None
        self._running: _RunningHandshake | None = None
        self._timer: Timer | None = None

    def dial(self) -> None:
        self._timer = None
        try:
            sock = socket.socket(self._address.family, socket.SOCK_STREAM)
        except OSError as error:  # none are left, of this process or of this machine
            self._retry(f"no socket to connect with: {error.strerror}")
            return
        prepare_socket(sock)
        code = sock.connect_ex(self._address.endpoint)
        if code not in (0, errno.EINPROGRESS):
            sock.close()
            self._retry(errno.errorcode.get(code, str(code)))
            return
        self._sock = sock
        self._mesh.loop.register(sock.fileno(), select.EPOLLOUT, self._on_connected)

    def _on_connected(self, _: int) -> None:
        sock = self._sock
        assert sock is not None
        self._sock = None
        self._mesh.loop.unregister(sock.fileno())
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            sock.close()
            self._retry(errno.errorcode.get(code, str(code)))
            return
        self._running = _RunningHandshake(
            self._mesh.loop, sock, self._new_handshake(), self._on_done, self._retry
        )
        self._running.begin()

    def _on_done(self, sock: socket.socket, peer: int) -> None:
        self._running = None
        self._mesh.reached(peer, sock)

    def _retry(self, why: str) -> None:
        self._running = None
        loop = self._mesh.loop
        self._mesh.complaints[self._peer] = f"{self._address}: {why}"
        self._timer = loop.call_at(loop.now() + self._pause_s, self.dial)
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._running is not None:
            self._running.end()
        if self._sock is not None:
            self._mesh.loop.unregister(self._sock.fileno())
            self._sock.close()

    def abandon(self) -> None:
        """In a forked child."""
        if self._running is not None:
            self._running.abandon()
        if self._sock is not None:
            self._sock.close()


@dataclass(slots=True)
class Wanted:
    """Peers that a call waits for. (The loop's `Pending`.)"""

    peers: set[int]

    @property
    def done(self) -> bool:
        return not self.peers


class Mesh:
    """The connections of one rank on one device. Called with the loop's lock held."""

    def __init__(
        self,
        loop: EventLoop,
        listener: socket.socket,
        peers: int,
        new_listener_handshake: Callable[[], Handshake],
        on_connected: Callable[[int, socket.socket], None],
        label: str,
    ) -> None:
        """Accept connections from now on, until all peers are connected.

        peers: how many there are.
        label: begins the lines in the log: "rank 1 of group 'dp'".
        """
        self.loop = loop
        self.complaints: dict[int, str] = {}  # why the last attempt to reach a peer failed
        self._listener: socket.socket | None = listener
        self._peers = peers
        self._dropped = 0
        self._new_listener_handshake = new_listener_handshake
        self._on_connected = on_connected
        self._label = label
        self._half_open: dict[int, _RunningHandshake] = {}  # oldest first
        self._diallers: dict[int, _Dialler] = {}
        self._connected: set[int] = set()
        self._wanted: list[Wanted] = []
        self._next_key = 0
        self._accept_timer: Timer | None = None
        loop.register(listener.fileno(), select.EPOLLIN, self._on_accept)
        self._close_port_if_complete()

    # Peers that belong to the group

    def dial(self, peer: int, address: Address, new_handshake: Callable[[], Handshake]) -> None:
        """Connect to a peer in the background, unless it has called us already.

        A collective and a message may ask for one peer at the same time.
        """
        if peer in self._connected or peer in self._diallers:
            return
        dialler = self._diallers[peer] = _Dialler(self, peer, address, new_handshake)
        dialler.dial()

    def want(self, peers: set[int]) -> Wanted:
        """Something to wait for: all of these are connected."""
        wanted = Wanted(peers - self._connected)
        self._wanted.append(wanted)
        return wanted

    def reached(self, peer: int, sock: socket.socket) -> None:
        self._diallers.pop(peer, None)
        self._connected.add(peer)
        self.complaints.pop(peer, None)
        for wanted in self._wanted:
            wanted.peers.discard(peer)
        self._wanted = [wanted for wanted in self._wanted if wanted.peers]
        self.loop.notify()
        self._on_connected(peer, sock)
        self._close_port_if_complete()

    # Connections from others

    def _on_accept(self, _: int) -> None:
        for _ in range(ACCEPTS_PER_EVENT):
            if self._listener is None:  # the last one made the mesh complete
                return
            try:
                sock, endpoint = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                    self._pause_accepting(error)
                    return
                continue  # the caller has gone again: the next one may be well
            prepare_socket(sock)
            self._begin_handshake(sock, f"{endpoint[0]}:{endpoint[1]}")

    def _pause_accepting(self, error: OSError) -> None:
        logger.warning("%s: cannot accept connections now: %s", self._label, error.strerror)
        assert self._listener is not None
        port = self._listener.fileno()
        self.loop.modify(port, 0)
        self._accept_timer = self.loop.call_at(
            self.loop.now() + ACCEPT_PAUSE_S, lambda: self.loop.modify(port, select.EPOLLIN)
        )

    def _begin_handshake(self, sock: socket.socket, origin: str) -> None:
        if len(self._half_open) >= HALF_OPEN_MAX:
            key = next(iter(self._half_open))
            self._half_open.pop(key).end()
            self._log_dropped("the oldest unknown caller", "there are too many of them")
        self._next_key += 1
        key = self._next_key

        def on_done(sock: socket.socket, peer: int) -> None:
            self._half_open.pop(key, None)
            self._welcome(sock, peer, origin)

        def on_failed(why: str) -> None:
            self._half_open.pop(key, None)
            self._log_dropped(origin, why)

        running = _RunningHandshake(
            self.loop, sock, self._new_listener_handshake(), on_done, on_failed
        )
        self._half_open[key] = running
        running.begin()

    def _welcome(self, sock: socket.socket, peer: int, origin: str) -> None:
        if peer in self._connected:
            why = f"rank {peer} is connected already; do two processes have this rank?"
        elif peer in self._diallers:
            why = f"rank {peer} is not to call but to be called"
        else:
            self.reached(peer, sock)
            return
        sock.close()
        self._log_dropped(origin, why)

    def _log_dropped(self, origin: str, why: str) -> None:
        self._dropped += 1
        if self._dropped > LOGGED_MAX:
            return
        more = "; no further ones are logged" if self._dropped == LOGGED_MAX else ""
        logger.warning("%s: dropped a connection from %s: %s%s", self._label, origin, why, more)

    def abandon(self) -> None:
        """In a forked child: close the copies of the parent's descriptors, and nothing else."""
        if self._listener is not None:
            self._listener.close()
        for running in self._half_open.values():
            running.abandon()
        for dialler in self._diallers.values():
            dialler.abandon()

    def close(self) -> None:
        for dialler in self._diallers.values():
            dialler.close()
        self._diallers.clear()
        self._close_port()

    def _close_port_if_complete(self) -> None:
        if len(self._connected) == self._peers:
            self._close_port()

    def _close_port(self) -> None:
        for running in self._half_open.values():
            running.end()
        self._half_open.clear()
        if self._accept_timer is not None:
            self._accept_timer.cancel()
        if self._listener is not None:
            self.loop.unregister(self._listener.fileno())
            self._listener.close()
            self._listener = None
