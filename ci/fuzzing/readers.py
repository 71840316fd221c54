"""What reads bytes that others have made: other ranks, the store, strangers, files of users.

A reader may raise the errors that it documents. Any other exception is a finding.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from socket import AF_INET

import torch

from conformance.harness.restricted_pickle import pack_for_parent, unpack_from_rank
from conformance.report.reading import Unreadable, read_certificate
from conformance.report.verify import problems
from conformance.target import TargetError, load_target
from impl.gloo.connect.fresh_prefix import decode_roll
from impl.testing.clock import SimulatedClock
from impl.testing.simulated_rank import SimulatedLoop, SimulatedRank
from impl.transport.meeting.addresses import Address, PublishedAddress, decode_value, encode_value
from impl.transport.messages.frames import TCP_RULES, Opcode, frame_header
from impl.transport.sockets.gloo_group import GlooGroup
from impl.transport.sockets.handshake import (
    AuthenticatedCaller,
    AuthenticatedListener,
    Credentials,
    GlooCaller,
    GlooListener,
    Handshake,
    HandshakeError,
)
from impl.transport.sockets.secret import Published
from impl.transport.sockets.tcp_group import TcpGroup

ROOT = Path(__file__).parents[2]
WORLD_SIZE = 4
_FOLDER = tempfile.TemporaryDirectory(prefix="fuzz")  # removed when the process ends
_MEMBER = Credentials(b"a secret that the fuzzer does not know", 0, WORLD_SIZE, 0)


class LetIn(AssertionError):
    """A handshake has accepted a connection that does not know the secret."""


@dataclass(frozen=True)
class Reader:
    """read: takes any bytes. may_raise: what it documents. seeds: inputs that it accepts."""

    read: Callable[[bytes], object]
    may_raise: tuple[type[Exception], ...]
    seeds: Sequence[bytes]


# ---- other ranks


class _Stream:
    """A connection on which these bytes arrive, and then its end."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)
        self.is_open = True

    def recv_into(self, buffer: memoryview, /) -> int:
        count = min(len(buffer), len(self._data))
        buffer[:count] = self._data[:count]
        self._data = self._data[count:]
        return count

    def sendmsg(self, buffers: Sequence[memoryview], /) -> int:
        return sum(map(len, buffers))

    def want_write(self, wanted: bool) -> None: ...

    def close(self) -> None:
        self.is_open = False


def _frames(kind: type[TcpGroup] | type[GlooGroup]) -> Callable[[bytes], None]:
    """A member of a group of two, which awaits two messages, hears this from the other one."""

    def read(data: bytes) -> None:
        clock = SimulatedClock()
        group = kind(0, 2, "fuzzed", 1, SimulatedLoop(clock))
        stream = _Stream(data)
        link = group.hubs[0].attach(1, stream)
        me = SimulatedRank(group, clock)
        for tag in range(2):
            me.post_receive(torch.empty(16), 1, tag)
        while stream.is_open:
            link.on_readable()

    return read


def _handshake(make: Callable[[], Handshake], is_authenticated: bool) -> Callable[[bytes], None]:
    def read(data: bytes) -> None:
        handshake = make()
        handshake.start()
        while handshake.needed and len(data) >= handshake.needed:
            part, data = data[: handshake.needed], data[handshake.needed :]
            handshake.receive(part)
        if is_authenticated and not handshake.needed:
            raise LetIn

    return read


# ---- files


def _in_a_file(name: str, read: Callable[[Path], object]) -> Callable[[bytes], None]:
    path = Path(_FOLDER.name, name)

    def write_and_read(data: bytes) -> None:
        path.write_bytes(data)
        read(path)

    return write_and_read


def _certificate(path: Path) -> None:
    list(problems(read_certificate(path)))


def _seeds_of_files(pattern: str, count: int) -> list[bytes]:
    return [path.read_bytes() for path in sorted(ROOT.glob(pattern))[:count]]


# One of each kind, with a payload where there may be one.
_FRAMES = [
    frame_header(opcode, slot=0, length=4, payload_nbytes=4) + b"text"
    if opcode in TCP_RULES.payload_nbytes_max
    else frame_header(opcode, slot=0, length=4)
    for opcode in Opcode
]
_VALUE = encode_value(
    PublishedAddress("host", Address(AF_INET, "127.0.0.1", 1), tuple(range(WORLD_SIZE)))
)
_NESTED = b"[" * 4000
_STORE = (ValueError,)  # of which `StoreMeeting.read` makes an error that names the rank

READERS = {
    "frames": Reader(_frames(TcpGroup), (), [*_FRAMES, b"".join(_FRAMES)]),
    "gloo_frames": Reader(_frames(GlooGroup), (), _FRAMES),
    "listener": Reader(
        _handshake(lambda: AuthenticatedListener(_MEMBER), True),
        (HandshakeError,),
        [AuthenticatedCaller(_MEMBER, 1).start()],
    ),
    "caller": Reader(
        _handshake(lambda: AuthenticatedCaller(_MEMBER, 1), True),
        (HandshakeError,),
        [AuthenticatedListener(_MEMBER).start()],
    ),
    "gloo_listener": Reader(
        _handshake(lambda: GlooListener(0, WORLD_SIZE), False), (HandshakeError,), [b"\1"]
    ),
    "gloo_caller": Reader(_handshake(lambda: GlooCaller(1, 7), False), (HandshakeError,), [b"\1"]),
    "addresses": Reader(lambda data: decode_value(data, WORLD_SIZE), _STORE, [_VALUE]),
    "roll": Reader(decode_roll, _STORE, [b'["1", ["a", "b"]]', _NESTED]),
    "secret": Reader(Published.decode, _STORE, [Published(bytes(32), b"").encode()]),
    "answers": Reader(
        unpack_from_rank,
        (UnpicklingError,),
        [pack_for_parent([1, "a", torch.ones(2), {"b": ValueError("c")}])],
    ),
    "certificate": Reader(
        _in_a_file("certificate.json", _certificate),
        (Unreadable,),
        [
            json.dumps({"format": 1}).encode(),
            _NESTED,
            *_seeds_of_files("reports/*/*/certificate.json", 1),
        ],
    ),
    "target": Reader(
        _in_a_file("target.toml", lambda path: load_target(str(path))),
        (TargetError,),
        [b"name = " + _NESTED, *_seeds_of_files("examples/targets/*.toml", 8)],
    ),
}


def read(name: str, data: bytes) -> None:
    """Let the reader read this. Raises what is a finding."""
    reader = READERS[name]
    try:
        reader.read(data)
    except reader.may_raise:
        return
