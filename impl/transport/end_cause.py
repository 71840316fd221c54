"""Reason for the end of a group (timeout, lost peer, abort): encoded for peers, and as an error.

The first rank that gives up (a timeout, a lost peer, an abort) tells all others why. Every rank
raises an error of the same type, whatever it was waiting for, and keeps raising it.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from impl import errors


class EndCause(enum.IntEnum):
    TIMEOUT = 1
    LOST = 2
    ABORT = 3
    MISMATCH = 4


_ERROR_TYPES: dict[EndCause, type[errors.CommunicationError]] = {
    EndCause.TIMEOUT: errors.CollectiveTimeout,
    EndCause.ABORT: errors.Aborted,
    EndCause.MISMATCH: errors.CollectiveMismatch,
}
_SEPARATOR = "\x1f"
_RANK = re.compile("[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class Fate:
    """Why a group ended, as stated by the rank that ended it.

    lost: the ranks that are gone, if that is why.
    """

    cause: EndCause
    decided_by: int
    text: str
    lost: tuple[int, ...] = ()

    def error(self, where: str, rank: int, world_size: int) -> errors.CommunicationError:
        """The error that `rank` raises, in the call that gives up or in a later one."""
        text = self.text
        if self.decided_by != rank:
            text = f"rank {self.decided_by} gave up. {text}"
        if not text.startswith(where):
            text = f"{where}, rank {rank} of {world_size}: {text}"
        if self.cause is EndCause.LOST:
            return errors.PeerLost(text, self.lost)
        return _ERROR_TYPES[self.cause](text)

    def encode(self) -> str:
        """As bytes for other ranks. The text comes last, as it may be cut off."""
        lost = ",".join(map(str, self.lost))
        return _SEPARATOR.join((self.cause.name, str(self.decided_by), lost, self.text))

    @classmethod
    def decode(cls, peer: int, message: str) -> Fate:
        """What a peer has said, of itself or of another. An unknown cause is an abort."""
        name, decider, lost, text = (*message.split(_SEPARATOR, 3), "", "", "")[:4]
        return cls(
            EndCause.__members__.get(name, EndCause.ABORT),
            int(decider) if _RANK.fullmatch(decider) else peer,
            text,
            tuple(int(rank) for rank in lost.split(",") if _RANK.fullmatch(rank)),
        )
