"""Connects all ranks: each publishes its address in the store and connects to the others."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from impl import errors
from impl.schedules.executor import Pending
from impl.transport.meeting.addresses import Address, PublishedAddress, connects_first, decode_value
from impl.transport.meeting.store import LOOK_S, StoreMeeting, not_come
from impl.transport.messages.frames import ProtocolError
from impl.transport.sockets.loop import EventLoop
from impl.transport.sockets.mesh import Mesh

T = TypeVar("T")


class SocketOptions(Protocol):
    """Where to listen: see `devices.choose_addresses`."""

    interface: str | None
    hostname: str | None


class AddressMeeting(StoreMeeting):
    """One rank's view of a group that is about to connect. Errors say who is missing."""

    operation = "connect"

    @property
    def where(self) -> str:
        return f"connecting group {self.group!r}"

    def published(
        self, key_of: Callable[[int], str], ranks: Sequence[int], decode: Callable[[bytes], T]
    ) -> dict[int, T]:
        """What these ranks have published. Raises `CollectiveTimeout` that names missing ranks, and
        `CommunicationError` as `read` does."""
        found: dict[int, T] = {}

        def missing() -> str:
            awaited = [rank for rank in ranks if rank not in found]
            return not_come(self.absent(key_of, awaited) or awaited)

        for rank in ranks:
            self.wait_for([key_of(rank)], missing)
            found[rank] = self.read(key_of(rank), rank, decode)
        return found

    def addresses(
        self, key_of: Callable[[int], str], ranks: Sequence[int]
    ) -> dict[int, PublishedAddress]:
        """The decoded values of these ranks."""
        return self.published(key_of, ranks, lambda data: decode_value(data, self.world_size))

    def to_dial(
        self, own: Address, values: Mapping[int, PublishedAddress]
    ) -> list[tuple[int, PublishedAddress]]:
        """Of these ranks, those that expect this one, which listens at `own`, to call.

        Raises `CommunicationError` where two addresses cannot be connected.
        """
        expecting = []
        for rank, value in values.items():
            try:
                if connects_first(own, value.address):
                    expecting.append((rank, value))
            except ProtocolError as error:
                raise errors.CommunicationError(
                    f"{self.where}, rank {self.rank} of {self.world_size}: no connection with"
                    f" rank {rank} is possible: {error}"
                ) from error
        return expecting

    def connect_all(self, meshes: Sequence[Mesh], peers: Sequence[int]) -> None:
        """Wait until every mesh has a connection to all `peers`, which are being dialled."""
        for mesh in meshes:
            with mesh.loop.lock:
                wanted = mesh.want(set(peers))
            if not self._wait(mesh.loop, wanted):
                with mesh.loop.lock:
                    missing = sorted(wanted.peers)
                    complaints = [mesh.complaints[p] for p in missing if p in mesh.complaints]
                detail = f" ({'; '.join(complaints)})" if complaints else ""
                raise self.timed_out(f"{errors.list_ranks(missing)} cannot be reached{detail}")

    def _wait(self, loop: EventLoop, wanted: Pending) -> bool:
        """Whether it is done by the deadline. Raises CommunicationError if another rank failed."""
        while True:
            look_at_s = min(self.until.at_s, time.monotonic() + LOOK_S)
            if loop.run_until(wanted, look_at_s):
                return True
            if time.monotonic() < look_at_s or look_at_s == self.until.at_s:
                return False
            self.check_others()


def own_value(address: Address, pair_identifiers: Sequence[int] = ()) -> PublishedAddress:
    return PublishedAddress(socket.gethostname(), address, tuple(pair_identifiers))
