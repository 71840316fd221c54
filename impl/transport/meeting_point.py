"""How ranks find each other through the store: publish, wait for the others, connect to all."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Protocol

from impl import errors
from impl.transport.base import Deadline
from impl.transport.frames import ProtocolError
from impl.transport.mesh import Mesh
from impl.transport.rendezvous import Address, RendezvousValue, connects_first, decode_value

_STORE_CLOCK_S = 0.05  # stores count whole milliseconds, on a clock of their own


class KeyValueStore(Protocol):
    """The part of `torch.distributed.Store` that is needed. Values of `set` may be bytes."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def wait(self, keys: list[str], timeout: timedelta) -> None: ...
    def check(self, keys: list[str]) -> bool: ...


class SocketOptions(Protocol):
    """Where to listen: see `devices.choose_addresses`."""

    interface: str | None
    hostname: str | None


class MeetingPoint:
    """One rank's view of a group that is about to connect. Errors say who is missing."""

    def __init__(
        self, store: KeyValueStore, rank: int, world_size: int, group: str, until: Deadline
    ) -> None:
        self._store = store
        self.rank = rank
        self.world_size = world_size
        self.group = group
        self._until = until

    @property
    def where(self) -> str:
        return f"connecting group {self.group!r}"

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank != self.rank]

    def publish(self, key: str, value: bytes) -> None:
        try:
            # torch's stores take bytes, though their annotations know only strings
            self._store.set(key, value)  # type: ignore[arg-type]
        except Exception as error:
            raise self._store_failed(error) from error

    def wait_for(self, key_of: Callable[[int], str], ranks: Sequence[int]) -> dict[int, bytes]:
        """What these ranks have published. Raises `CollectiveTimeout` naming those that did not."""
        found = {}
        for rank in ranks:
            key = key_of(rank)
            left_s = max(self._until.at_s - time.monotonic(), 0.0)
            try:
                self._store.wait([key], timedelta(seconds=left_s + _STORE_CLOCK_S))
                found[rank] = self._store.get(key)
            except Exception as error:
                if time.monotonic() < self._until.at_s:
                    raise self._store_failed(error) from error
                missing = [other for other in ranks if other not in found]
                absent = self._absent(missing, key_of)
                have = "has" if len(absent) == 1 else "have"
                raise self.timed_out(absent, f"{have} not come") from error
        return found

    def _absent(self, ranks: Sequence[int], key_of: Callable[[int], str]) -> list[int]:
        try:
            absent = [rank for rank in ranks if not self._store.check([key_of(rank)])]
        except Exception:
            return list(ranks)
        return absent or list(ranks)

    def addresses(
        self, key_of: Callable[[int], str], ranks: Sequence[int]
    ) -> dict[int, RendezvousValue]:
        """The decoded values of these ranks."""
        values = {}
        for rank, data in self.wait_for(key_of, ranks).items():
            try:
                values[rank] = decode_value(data, self.world_size)
            except ProtocolError as error:
                raise errors.CommunicationError(
                    f"{self.where}, rank {self.rank} of {self.world_size}: what rank {rank} has"
                    f" published is no address: {error}"
                ) from error
        return values

    def to_dial(
        self, own: Address, values: Mapping[int, RendezvousValue]
    ) -> list[tuple[int, RendezvousValue]]:
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

    def timed_out(self, ranks: Iterable[int], what: str) -> errors.CollectiveTimeout:
        missing = f"{errors.list_ranks(list(ranks))} {what}"
        return errors.CollectiveTimeout(
            errors.timeout_message(
                self.where, "connect", self._until.timeout_s, self.rank, self.world_size, missing
            )
        )

    def _store_failed(self, error: Exception) -> errors.CommunicationError:
        return errors.CommunicationError(
            f"{self.where}, rank {self.rank} of {self.world_size}: the store failed: {error}"
        )

    def connect_all(self, meshes: Sequence[Mesh], peers: Sequence[int]) -> None:
        """Wait until every mesh has a connection to all `peers`, which are being dialled."""
        loop = meshes[0].loop
        for mesh in meshes:
            with loop.lock:
                wanted = mesh.want(set(peers))
            if not loop.run_until(wanted, self._until.at_s):
                with loop.lock:
                    missing = sorted(wanted.peers)
                    complaints = [mesh.complaints[p] for p in missing if p in mesh.complaints]
                detail = f" ({'; '.join(complaints)})" if complaints else ""
                raise self.timed_out(missing, f"cannot be reached{detail}")


def own_value(address: Address, pair_identifiers: Sequence[int] = ()) -> RendezvousValue:
    return RendezvousValue(socket.gethostname(), address, tuple(pair_identifiers))
