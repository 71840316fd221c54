"""A group's shared secret over TCP: the user's or one in the store, and the key derived from it.

[Note: who can get in] Rank 0 publishes random bytes for each group in the store. By default they
are the secret, which is then readable by every client of the store, and torch's TCPStore has no
authentication. A secret configured by the user never passes through the store: each group's key is
derived from it and from the published bytes, so that an answer recorded in one group is of no use
in another one, or in a later one of the same name.
"""

from __future__ import annotations

import functools
import hmac
import logging
import os
import secrets
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from impl import errors
from impl.transport.meeting.addresses import Address
from impl.transport.sockets.connect_all import AddressMeeting

SECRET_VARIABLE = "PYGLOO_SECRET"
FILE_VARIABLE = "PYGLOO_SECRET_FILE"
SECRET_NBYTES_MIN = 16

_NBYTES = 32  # of what rank 0 makes up, and of each proof
_STORE_KEY = "tcp/secret"

_log = logging.getLogger(__name__)


def users_secret(environ: Mapping[str, str] = os.environ) -> bytes | None:
    """The secret in PYGLOO_SECRET, or in the file that PYGLOO_SECRET_FILE names; None without.

    White space around it does not count. Raises ValueError if both are set, the file cannot be
    read or others than its owner may use it, or the secret is shorter than 16 bytes.
    """
    named = [name for name in (SECRET_VARIABLE, FILE_VARIABLE) if environ.get(name)]
    if not named:
        return None
    if len(named) > 1:
        raise ValueError(f"{SECRET_VARIABLE} and {FILE_VARIABLE} are both set; one is needed")
    [name] = named
    secret = _read(environ[name]) if name == FILE_VARIABLE else os.fsencode(environ[name])
    secret = secret.strip()
    if len(secret) < SECRET_NBYTES_MIN:
        raise ValueError(
            f"{name}: the secret has {len(secret)} bytes, and needs {SECRET_NBYTES_MIN} or more"
        )
    return secret


def _read(path: str) -> bytes:
    try:
        with Path(path).open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & 0o077:
                raise ValueError(
                    f"{FILE_VARIABLE}: {path} has mode {mode:o}, so that others may use it; "
                    f"it needs 600"
                )
            return file.read()
    except OSError as error:
        raise ValueError(f"{FILE_VARIABLE}: cannot read {path}: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class Published:
    """What rank 0 puts into the store.

    proof: shows that a reader has the same secret of the users' own; b"" where there is none.
    """

    random: bytes
    proof: bytes

    def encode(self) -> bytes:
        return f"{self.random.hex()} {self.proof.hex()}".encode()

    @classmethod
    def decode(cls, data: bytes) -> Published:
        random, _, proof = (bytes.fromhex(part) for part in data.decode().partition(" "))
        if len(random) != _NBYTES or len(proof) not in (0, _NBYTES):
            raise ValueError(f"{len(random)} and {len(proof)} bytes instead of {_NBYTES}")
        return cls(random, proof)


def agree_on_secret(meeting: AddressMeeting, own: bytes | None) -> bytes:
    """The key of this group, which all ranks of the meeting get.

    own: the users' secret. Raises CommunicationError if rank 0 has another one.
    """
    if meeting.rank == 0:
        random = secrets.token_bytes(_NBYTES)
        meeting.publish(_STORE_KEY, Published(random, _proof(own, random)).encode())
    told = meeting.published(lambda _: _STORE_KEY, [0], Published.decode)[0]
    if not hmac.compare_digest(told.proof, _proof(own, told.random)):
        raise errors.CommunicationError(
            f"{meeting.where}, rank {meeting.rank} of {meeting.world_size}: "
            f"{_differs(own, told)}. Set {SECRET_VARIABLE} or {FILE_VARIABLE} to the same secret "
            f"on all ranks, or on none."
        )
    if own is None:
        return told.random
    return hmac.digest(own, b"key" + told.random + meeting.group.encode(), "sha256")


def warn_if_reachable(meeting: AddressMeeting, addresses: Sequence[Address]) -> None:
    """Say that the secret is in the store, if other hosts can reach the group. Rank 0 says it."""
    outside = [address.host for address in addresses if not address.is_loopback]
    if meeting.rank == 0 and outside:
        _warn_once(meeting.group, ", ".join(outside))


@functools.cache
def _warn_once(group: str, hosts: str) -> None:
    _log.warning(
        "group %r listens at %s, and its secret is readable in the store, without authentication. "
        "Set %s or %s to a secret of your own.",
        *(group, hosts, SECRET_VARIABLE, FILE_VARIABLE),
    )


def _proof(own: bytes | None, random: bytes) -> bytes:
    return b"" if own is None else hmac.digest(own, b"proof" + random, "sha256")


def _differs(own: bytes | None, told: Published) -> str:
    if own is None:
        return "rank 0 has a secret, and this rank has none"
    if not told.proof:
        return "this rank has a secret, and rank 0 has none"
    return "rank 0 has another secret than this rank"
