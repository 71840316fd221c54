"""Addresses that ranks publish in the store (Gloo's binary form), and which rank connects to which.

[Note: what Gloo's ranks publish]
Little-endian (gloo/transport/tcp/context.cc, class Rank, and address.h):

    u64       length of the host name
    bytes     host name; peers count equal names to number the ranks of a host, nothing else
    u64       length of the address, 136
    128       sockaddr_storage: family u16, port u16 big-endian, IPv4 at +4 or IPv6 at +8
    i64       sequence number, -1 in what is published
    i64 x N   pair identifiers: what rank i has to say when it connects; absent when set up lazily

C++ Gloo leaves rubbish from its stack in the unused part of the address. We write zeros and read
what we need.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
from dataclasses import dataclass

from impl.transport.messages.frames import ProtocolError

SOCKADDR_NBYTES = 128
ADDRESS_NBYTES = SOCKADDR_NBYTES + 8
HOST_NAME_NBYTES_MAX = 4096
SEQUENCE_UNSET = -1

_U64 = struct.Struct("<Q")
_I64 = struct.Struct("<q")


@dataclass(frozen=True, slots=True)
class Address:
    """Where a rank listens: `host` is a numeric IPv4 or IPv6 address."""

    family: socket.AddressFamily
    host: str
    port: int
    scope_id: int = 0  # of a link-local IPv6 address: the interface it is reached through

    @property
    def packed_ip(self) -> bytes:
        return socket.inet_pton(self.family, self.host)

    @property
    def endpoint(self) -> tuple[str, int] | tuple[str, int, int, int]:
        """What `socket.connect` and `socket.bind` take."""
        if self.family == socket.AF_INET6:
            return (self.host, self.port, 0, self.scope_id)
        return (self.host, self.port)

    @property
    def is_loopback(self) -> bool:
        """Whether only this host can reach it."""
        return ipaddress.ip_address(self.host).is_loopback

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class PublishedAddress:
    host_name: str
    address: Address
    pair_identifiers: tuple[int, ...] = ()

    def greeting_from(self, rank: int) -> int:
        """The first bytes that `rank` sends when it connects to the owner of this value."""
        return self.pair_identifiers[rank] if self.pair_identifiers else rank


def encode_address(address: Address) -> bytes:
    """The 136 bytes of an address without a sequence number."""
    family = struct.pack("<H", address.family)
    port = struct.pack(">H", address.port)
    if address.family == socket.AF_INET6:
        tail = struct.pack("<I", 0) + address.packed_ip + struct.pack("<I", address.scope_id)
    else:
        tail = address.packed_ip
    sockaddr = (family + port + tail).ljust(SOCKADDR_NBYTES, b"\0")
    return sockaddr + _I64.pack(SEQUENCE_UNSET)


def decode_address(data: bytes) -> Address:
    """Raises `ProtocolError` for anything but an IPv4 or IPv6 address with a port."""
    if len(data) != ADDRESS_NBYTES:
        raise ProtocolError(f"address of {len(data)} bytes instead of {ADDRESS_NBYTES}")
    (family,) = struct.unpack_from("<H", data, 0)
    (port,) = struct.unpack_from(">H", data, 2)
    if port == 0:
        raise ProtocolError("address without a port")
    if family == socket.AF_INET:
        return Address(socket.AF_INET, socket.inet_ntop(socket.AF_INET, data[4:8]), port)
    if family == socket.AF_INET6:
        (scope_id,) = struct.unpack_from("<I", data, 24)
        host = socket.inet_ntop(socket.AF_INET6, data[8:24])
        return Address(socket.AF_INET6, host, port, scope_id)
    raise ProtocolError(f"address of unknown family {family}")


def encode_value(value: PublishedAddress) -> bytes:
    name = value.host_name.encode()
    return b"".join(
        [
            _U64.pack(len(name)),
            name,
            _U64.pack(ADDRESS_NBYTES),
            encode_address(value.address),
            *map(_I64.pack, value.pair_identifiers),
        ]
    )


def decode_value(data: bytes, world_size: int) -> PublishedAddress:
    """Raises `ProtocolError` if `data` is cut off, too long, or made for another world size."""
    name, rest = _take_counted(data, "host name", HOST_NAME_NBYTES_MAX)
    address, rest = _take_counted(rest, "address", ADDRESS_NBYTES)
    if len(rest) not in (0, _I64.size * world_size):
        raise ProtocolError(
            f"{len(rest)} bytes of pair identifiers instead of none or {_I64.size * world_size}"
        )
    identifiers = tuple(number for (number,) in _I64.iter_unpack(rest))
    return PublishedAddress(name.decode(errors="replace"), decode_address(address), identifiers)


def _take_counted(data: bytes, what: str, nbytes_max: int) -> tuple[bytes, bytes]:
    if len(data) < _U64.size:
        raise ProtocolError(f"value ends before the length of the {what}")
    (nbytes,) = _U64.unpack_from(data)
    if nbytes > min(nbytes_max, len(data) - _U64.size):
        raise ProtocolError(f"{what} of {nbytes} bytes in a value of {len(data)}")
    end = _U64.size + nbytes
    return data[_U64.size : end], data[end:]


def connects_first(own: Address, other: Address) -> bool:
    """Whether the owner of `own` opens the connection to `other`; the other side then waits for it.

    Gloo compares the bytes of the IP address, then the ports as they lie in memory: a big-endian
    number read by a little-endian machine. The greater side connects. Both sides use one family.
    """
    if own.family != other.family:
        raise ProtocolError(
            f"{own} and {other} are of different address families; choose one with"
            " GLOO_SOCKET_IFNAME"
        )
    own_key, other_key = (
        (each.packed_ip, int.from_bytes(each.port.to_bytes(2, "big"), "little"))
        for each in (own, other)
    )
    if own_key == other_key:
        raise ProtocolError(f"two ranks have published the address {own}")
    return own_key > other_key
