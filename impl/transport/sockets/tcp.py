"""`TcpCommunicator`: connects all ranks over TCP, authenticated by a shared secret.

The ranks agree on a secret (`secret.py`), every rank publishes where it listens, and for each pair
the one with the greater address calls the other. The connections are authenticated
(`handshake.py`); what travels over them is in `tcp_group.py` and `eager.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from impl.transport.base import Deadline
from impl.transport.meeting.addresses import Address, encode_value
from impl.transport.meeting.interfaces import choose_addresses
from impl.transport.meeting.store import KeyValueStore, others_are_told
from impl.transport.sockets.communicator import SocketCommunicator
from impl.transport.sockets.connect_all import AddressMeeting, SocketOptions, own_value
from impl.transport.sockets.handshake import (
    AuthenticatedCaller,
    AuthenticatedListener,
    Credentials,
)
from impl.transport.sockets.loop import EventLoop
from impl.transport.sockets.secret import agree_on_secret, users_secret, warn_if_reachable
from impl.transport.sockets.tcp_group import TcpGroup


def connect_tcp(
    store: KeyValueStore,
    rank: int,
    world_size: int,
    group: str,
    options: SocketOptions,
    until: Deadline,
) -> TcpCommunicator:
    """Connect all ranks of a group. `store` holds no keys of an earlier group.

    Raises `CollectiveTimeout` if ranks do not come in time, `DeviceError` if there is nowhere to
    listen, `CommunicationError` if the store fails, another rank does, or not all have the same
    secret, and ValueError if `PYGLOO_SECRET` or `PYGLOO_SECRET_FILE` holds none.
    """
    if world_size == 1:
        return TcpCommunicator(rank, world_size, group, device_count=1)
    with others_are_told(store, rank):
        addresses = choose_addresses(options.interface, options.hostname)
        communicator = TcpCommunicator(rank, world_size, group, len(addresses))
        try:
            communicator.meet(AddressMeeting(store, rank, world_size, group, until), addresses)
        except BaseException:
            communicator.close()
            raise
    return communicator


class TcpCommunicator(SocketCommunicator):
    """Implements `Communicator` with authentication."""

    def __init__(self, rank: int, world_size: int, group: str, device_count: int) -> None:
        loop = EventLoop(f"pygloo-tcp-{group}")
        super().__init__(TcpGroup(rank, world_size, group, device_count, loop), loop)

    def meet(self, meeting: AddressMeeting, addresses: Sequence[Address]) -> None:
        """Agree on a secret, listen at the addresses and connect to all peers."""
        own_secret = users_secret()
        secret = agree_on_secret(meeting, own_secret)
        if own_secret is None:
            warn_if_reachable(meeting, addresses)
        listening = []
        for device, address in enumerate(addresses):
            member = Credentials(secret, self.rank, self.world_size, device)
            own = self._listen(device, address, functools.partial(AuthenticatedListener, member))
            meeting.publish(_address_key(device, self.rank), encode_value(own_value(own)))
            listening.append((member, own))
        for mesh, (member, own) in zip(self._meshes, listening, strict=True):
            key_of = functools.partial(_address_key, member.device)
            values = meeting.addresses(key_of, meeting.others)
            with self._loop.lock:
                for peer, value in meeting.to_dial(own, values):
                    new_handshake = functools.partial(AuthenticatedCaller, member, peer)
                    mesh.dial(peer, value.address, new_handshake)
        meeting.connect_all(self._meshes, meeting.others)

    def _before_messages(self, peers: Sequence[int], until: Deadline) -> None:
        """All connections are there from the beginning."""


def _address_key(device: int, rank: int) -> str:
    return f"tcp/{device}/{rank}"
