"""Handshake of a new connection: Gloo's rank number, or HMAC challenge and response with a secret.

Bytes in, bytes out: nothing here reads or writes a socket.

[Note: challenge and response]
In the authenticated mode both ends prove that they know the group's secret, without showing it:

    listener  -> caller     MAGIC, nonce L
    caller    -> listener   MAGIC, own rank, nonce C, HMAC("caller", ranks, device, L, C)
    listener  -> caller     HMAC("listener", ranks, device, L, C)

Nonces are 32 fresh random bytes, so an answer is of no use a second time; the roles and ranks are
part of what is signed, so an answer cannot be sent back or passed on to another rank. What
follows on the connection is neither signed nor encrypted: this keeps strangers, strays and
members of other groups out, not an attacker who can change packets between the hosts.

Gloo's mode has nothing of this: the caller sends the number that the listener has published for it.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

MAGIC = b"pygloo1\n"
NONCE_NBYTES = 32
MAC_NBYTES = 32

_GREETING = struct.Struct("<q")
_RANKS = struct.Struct("<QQQ")
_RANK = struct.Struct("<Q")

CHALLENGE_NBYTES = len(MAGIC) + NONCE_NBYTES
ANSWER_NBYTES = _RANK.size + NONCE_NBYTES + MAC_NBYTES


class HandshakeError(Exception):
    """The other end is not who it should be."""


class Handshake(Protocol):
    """One end of the beginning of a connection.

    `needed` is the number of bytes that `receive` takes next: never read more, what follows
    belongs to the frames. 0 when the handshake is complete; then `peer` is the rank at the other
    end.
    """

    needed: int
    peer: int

    def start(self) -> bytes:
        """What this end sends without being asked."""

    def receive(self, data: bytes) -> bytes:
        """Take exactly `needed` bytes; what to send in return. Raises `HandshakeError`."""


class GlooCaller:
    """Send the number that the listener has published for this rank; no answer follows."""

    def __init__(self, peer: int, greeting: int) -> None:
        self.needed = 0
        self.peer = peer
        self._greeting = greeting

    def start(self) -> bytes:
        return _GREETING.pack(self._greeting)

    def receive(self, data: bytes) -> bytes:
        raise HandshakeError("a listener does not answer")


class GlooListener:
    """Wait for a number. We publish each rank's own number as its identifier."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.needed = _GREETING.size
        self.peer = -1
        self._rank = rank
        self._world_size = world_size

    def start(self) -> bytes:
        return b""

    def receive(self, data: bytes) -> bytes:
        (greeting,) = _GREETING.unpack(data)
        if not 0 <= greeting < self._world_size or greeting == self._rank:
            raise HandshakeError("its first bytes name no other rank of the group")
        self.needed, self.peer = 0, greeting
        return b""


@dataclass(frozen=True, slots=True)
class Credentials:
    """What the ends of a connection must have in common, and who they are."""

    secret: bytes
    rank: int
    world_size: int
    device: int

    def proof(self, role: bytes, caller: int, listener: int, nonces: bytes) -> bytes:
        ranks = _RANKS.pack(caller, listener, self.device)
        return hmac.digest(self.secret, role + ranks + nonces, "sha256")


class AuthenticatedListener:
    def __init__(
        self, member: Credentials, new_nonce: Callable[[int], bytes] | None = None
    ) -> None:
        self.needed = len(MAGIC)  # a stranger usually fails here, without being waited for
        self.peer = -1
        self._member = member
        self._nonce = (new_nonce or secrets.token_bytes)(NONCE_NBYTES)
        self._knows_protocol = False

    def start(self) -> bytes:
        return MAGIC + self._nonce

    def receive(self, data: bytes) -> bytes:
        if not self._knows_protocol:
            if data != MAGIC:
                raise HandshakeError("it speaks another protocol")
            self._knows_protocol = True
            self.needed = ANSWER_NBYTES
            return b""
        member = self._member
        (caller,) = _RANK.unpack_from(data)
        nonces = self._nonce + data[_RANK.size : _RANK.size + NONCE_NBYTES]
        expected = member.proof(b"caller", caller, member.rank, nonces)
        if not hmac.compare_digest(expected, data[_RANK.size + NONCE_NBYTES :]):
            raise HandshakeError("it does not know the secret of the group")
        if caller >= member.world_size or caller == member.rank:
            raise HandshakeError(f"it claims to be rank {caller}")
        self.needed, self.peer = 0, caller
        return member.proof(b"listener", caller, member.rank, nonces)


class AuthenticatedCaller:
    def __init__(
        self, member: Credentials, peer: int, new_nonce: Callable[[int], bytes] | None = None
    ) -> None:
        self.needed = CHALLENGE_NBYTES
        self.peer = peer
        self._member = member
        self._nonce = (new_nonce or secrets.token_bytes)(NONCE_NBYTES)
        self._expected: bytes | None = None

    def start(self) -> bytes:
        return MAGIC

    def receive(self, data: bytes) -> bytes:
        member = self._member
        if self._expected is not None:
            if not hmac.compare_digest(self._expected, data):
                raise HandshakeError("it does not know the secret of the group")
            self.needed = 0
            return b""
        if not data.startswith(MAGIC):
            raise HandshakeError("it speaks another protocol")
        nonces = data[len(MAGIC) :] + self._nonce
        self._expected = member.proof(b"listener", member.rank, self.peer, nonces)
        self.needed = MAC_NBYTES
        proof = member.proof(b"caller", member.rank, self.peer, nonces)
        return _RANK.pack(member.rank) + self._nonce + proof
