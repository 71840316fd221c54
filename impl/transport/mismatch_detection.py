"""Detection of mismatched collectives over TCP: call numbers in frames, statements of every rank.

[Note: call numbers]
Collectives of a group are counted. A *call number* has the count in its upper bits and, in the
lower 32, a digest of what must be equal on all ranks: the operation and its signature. Every
frame of a collective carries the sender's call number, and a rank does not change any tensor before
it has heard this number from every other rank. So a rank is never more than one call ahead of
another, and one that calls something else is noticed by all it talks to.

A rank that notices sends out a STATEMENT, its own call in words. A statement makes every rank that
hears it state its own, so that all ranks can raise the same table.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from impl.transport.base import CallInfo, exchange_of

REMEMBERED_CALLS = 64  # how late a frame of an earlier call may come and still be compared
_FIELDS = "\x1f"  # separates the parts of a statement; occurs in no operation or signature
_WHOLE = re.compile("-?[0-9]{1,20}")  # a number of 64 bits, in decimal digits


def call_number(index: int, call: CallInfo) -> int:
    return index << 32 | _digest(call.operation, call.signature)


@lru_cache(maxsize=256)
def _digest(operation: str, signature: str) -> int:
    return zlib.crc32(f"{exchange_of(operation)} {signature}".encode())


def index_of(number: int) -> int:
    return number >> 32


@dataclass(frozen=True, slots=True)
class Statement:
    """One rank's call, in words."""

    operation: str
    sequence: int
    signature: str
    shown: str

    @classmethod
    def of(cls, call: CallInfo) -> Statement:
        return cls(call.operation, call.sequence, call.signature, call.shown)

    def encode(self, index: int) -> str:
        parts = (str(index), self.operation, str(self.sequence), self.signature, self.shown)
        return _FIELDS.join(parts)

    @classmethod
    def decode(cls, text: str) -> tuple[int, Statement] | None:
        """The index of the call and the statement; None if the text is something else."""
        parts = text.split(_FIELDS)
        if len(parts) != 5 or not all(map(_WHOLE.fullmatch, (parts[0], parts[2]))):
            return None
        return int(parts[0]), cls(parts[1], int(parts[2]), parts[3], parts[4])


@dataclass(slots=True)
class Dispute:
    """A call on which ranks disagree, and the statements about it that have arrived so far."""

    index: int
    statements: dict[int, Statement]  # by rank


class Agreement:
    """What one rank knows about which call its peers have reached. Pure bookkeeping."""

    def __init__(self, rank: int, peers: Iterable[int]) -> None:
        self._rank = rank
        self._peers = frozenset(peers)
        self._next_index = 0
        self.number = 0  # of the present or last call
        self._missing: set[int] = set()  # peers that have not shown the present number
        self._ahead: dict[int, dict[int, int]] = {}  # index -> peer -> number, of calls to come
        self._past: dict[int, tuple[int, CallInfo]] = {}  # index -> number, own call
        self._is_given_up = False
        self.dispute: Dispute | None = None

    @property
    def done(self) -> bool:
        """Whether every peer has made the same call, or no rank waits for it any more."""
        return not self._missing or self._is_given_up

    def give_up(self) -> None:
        """The group has failed: a rank that waits for others stops waiting."""
        self._is_given_up = True

    def assume_heard(self) -> None:
        """All peers are known to have made the same call, though not all have said so here."""
        self._missing.clear()

    @property
    def missing(self) -> list[int]:
        """The peers from which nothing has been heard in the present call."""
        return sorted(self._missing)

    @property
    def index(self) -> int:
        """Of the present or last call; -1 before the first."""
        return self._next_index - 1

    def begin(self, call: CallInfo) -> int:
        """A collective starts: its call number. Frames that came early are looked at now."""
        index = self._next_index
        self._next_index += 1
        self.number = call_number(index, call)
        self._past[index] = (self.number, call)
        self._past.pop(index - REMEMBERED_CALLS, None)
        if self.dispute is not None and self.dispute.index == index:
            self.dispute.statements[self._rank] = Statement.of(call)
        self._missing = set(self._peers)
        for peer, number in self._ahead.pop(index, {}).items():
            self.hear(peer, number)
        return self.number

    def hear(self, peer: int, number: int) -> None:
        """A frame of `peer` carried this number. Afterwards look at `dispute`."""
        if number == self.number:
            self._missing.discard(peer)
            return
        index = index_of(number)
        if index >= self._next_index:
            self._ahead.setdefault(index, {})[peer] = number
        elif index in self._past and self._past[index][0] != number and self.dispute is None:
            self.dispute = Dispute(index, {self._rank: Statement.of(self._past[index][1])})

    def own_statement(self, index: int) -> Statement | None:
        """What this rank has called at `index`; None if that is still to come, or long past."""
        past = self._past.get(index)
        return Statement.of(past[1]) if past else None

    def hear_statement(self, peer: int, index: int, statement: Statement) -> None:
        """`peer` disputes a call, or answers to a rank that does."""
        if self.dispute is None:
            own = self.own_statement(index)
            self.dispute = Dispute(index, {} if own is None else {self._rank: own})
        if self.dispute.index == index:
            self.dispute.statements[peer] = statement

    def is_settled(self) -> bool:
        """Whether every rank's statement about the disputed call is known."""
        return self.dispute is not None and len(self.dispute.statements) == len(self._peers) + 1
