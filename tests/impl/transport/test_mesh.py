"""Connections of one rank, made on its event loop."""

from __future__ import annotations

import errno
import socket
from unittest.mock import Mock

import pytest

from impl.transport.meeting.addresses import Address
from impl.transport.meeting.interfaces import listen
from impl.transport.sockets.handshake import GlooCaller, GlooListener
from impl.transport.sockets.loop import EventLoop
from impl.transport.sockets.mesh import Mesh
from tests.impl.transport.ranks import soon


def test_a_peer_is_dialled_once_for_a_message_and_a_collective_at_the_same_time() -> None:
    listener, _ = listen(Address(socket.AF_INET, "127.0.0.1", 0))
    peers_listener, address = listen(Address(socket.AF_INET, "127.0.0.1", 0))
    loop = EventLoop("test")
    connected: list[socket.socket] = []
    with loop.lock:
        mesh = Mesh(
            loop, listener, 1, lambda: GlooListener(0, 2), lambda _, s: connected.append(s), ""
        )
        for _ in range(2):
            mesh.dial(1, address, lambda: GlooCaller(1, 0))
        wanted = mesh.want({1})
    assert loop.run_until(wanted, soon().at_s)
    peers_listener.accept()[0].close()
    with pytest.raises(BlockingIOError):
        peers_listener.accept()
    with loop.lock:
        mesh.close()
    loop.close()
    peers_listener.close()
    (sock,) = connected
    sock.close()


def test_a_dialler_without_a_socket_says_so_and_tries_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listener, own = listen(Address(socket.AF_INET, "127.0.0.1", 0))
    loop = EventLoop("test")
    connected: list[socket.socket] = []
    with loop.lock:
        mesh = Mesh(
            loop, listener, 2, lambda: GlooListener(0, 3), lambda _, s: connected.append(s), ""
        )
        with monkeypatch.context() as patched:
            patched.setattr(socket, "socket", Mock(side_effect=OSError(errno.EMFILE, "too many")))
            mesh.dial(1, own, lambda: GlooCaller(1, 2))
        assert mesh.complaints == {1: f"{own}: no socket to connect with: too many"}
        wanted = mesh.want({1})
    assert loop.run_until(wanted, soon().at_s)
    with loop.lock:
        mesh.close()
    loop.close()
    for sock in connected:
        sock.close()
