"""The addresses that ranks publish: Gloo's binary form byte for byte, and what is refused."""

from __future__ import annotations

import contextlib
import socket

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from impl import errors
from impl.transport.base import Deadline
from impl.transport.meeting.addresses import (
    ADDRESS_NBYTES,
    Address,
    PublishedAddress,
    connects_first,
    decode_value,
    encode_value,
)
from impl.transport.messages.frames import ProtocolError
from impl.transport.sockets.connect_all import AddressMeeting, own_value

V4 = Address(socket.AF_INET, "10.1.2.3", 0x1234)
V6 = Address(socket.AF_INET6, "fe80::1", 4242, scope_id=3)


def test_the_value_has_gloo_s_layout() -> None:
    value = encode_value(PublishedAddress("host", V4, (0, 1, -2)))
    assert value[:12] == b"\x04\0\0\0\0\0\0\0host"
    assert value[12:20] == b"\x88\0\0\0\0\0\0\0"
    sockaddr, rest = value[20:148], value[148:]
    assert sockaddr == b"\x02\0\x12\x34\x0a\x01\x02\x03".ljust(128, b"\0"), "the rest is zero"
    assert rest[:8] == b"\xff" * 8, "no sequence number"
    assert rest[8:] == bytes(8) + b"\x01" + bytes(7) + b"\xfe" + b"\xff" * 7


def test_a_lazy_rank_publishes_no_identifiers() -> None:
    value = encode_value(PublishedAddress("h", V4))
    assert len(value) == 8 + 1 + 8 + ADDRESS_NBYTES
    assert decode_value(value, world_size=4).greeting_from(3) == 3
    assert decode_value(encode_value(PublishedAddress("h", V4, (7, 8))), 2).greeting_from(1) == 8


@given(
    name=st.text(max_size=30),
    host=st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)),
    port=st.integers(1, 65535),
    identifiers=st.one_of(st.just(()), st.tuples(*[st.integers(-(1 << 63), (1 << 63) - 1)] * 3)),
)
def test_what_is_written_can_be_read(
    name: str, host: object, port: int, identifiers: tuple[int, ...]
) -> None:
    text = str(host)
    family = socket.AF_INET6 if ":" in text else socket.AF_INET
    canonical = socket.inet_ntop(family, socket.inet_pton(family, text))
    value = PublishedAddress(name, Address(family, canonical, port), identifiers)
    assert decode_value(encode_value(value), world_size=3) == value


def test_ipv6_keeps_its_scope() -> None:
    assert decode_value(encode_value(PublishedAddress("h", V6)), 2).address == V6
    assert V6.endpoint == ("fe80::1", 4242, 0, 3)
    assert str(V6) == "[fe80::1]:4242"
    assert str(V4) == "10.1.2.3:4660"


GOOD = encode_value(PublishedAddress("host", V4, (0, 1)))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x04",
        b"\xff" * 8 + b"host",
        GOOD[:30],
        GOOD[:-1],
        GOOD + b"x",
        GOOD.replace(b"\x88", b"\x80"),
        GOOD[:20] + b"\x01" + GOOD[21:],  # AF_UNIX
        GOOD[:22] + b"\0\0" + GOOD[24:],  # port 0
        (1 << 20).to_bytes(8, "little") + bytes(1 << 20),
    ],
    ids=range(10),
)
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_value(data, world_size=2)


@given(data=st.binary(max_size=300))
def test_no_bytes_do_harm(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        decode_value(data, world_size=2)


def test_a_value_for_another_world_size_is_refused() -> None:
    with pytest.raises(ProtocolError, match="pair identifiers"):
        decode_value(GOOD, world_size=3)


def test_the_greater_address_connects() -> None:
    low, high = (Address(socket.AF_INET, host, 1) for host in ("9.255.255.255", "10.0.0.1"))
    assert connects_first(high, low)
    assert not connects_first(low, high)


def test_ports_are_compared_as_they_lie_in_memory() -> None:
    # 0x0100 is stored as 01 00 and 0x0002 as 00 02: read by a little-endian machine, 1 < 512
    small, large = (Address(socket.AF_INET, "1.1.1.1", port) for port in (0x0100, 0x0002))
    assert connects_first(large, small)


def test_addresses_that_cannot_meet_are_a_failure_of_communication() -> None:
    meeting = AddressMeeting(dist.HashStore(), 0, 2, "g", Deadline(0.0, 0.0))
    with pytest.raises(errors.CommunicationError, match="no connection with rank 1 is possible"):
        meeting.to_dial(V4, {1: own_value(V6)})


def test_there_is_no_order_between_equals_or_families() -> None:
    with pytest.raises(ProtocolError, match="two ranks"):
        connects_first(V4, V4)
    with pytest.raises(ProtocolError, match="GLOO_SOCKET_IFNAME"):
        connects_first(V4, V6)
