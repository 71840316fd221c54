"""Matching of receives with messages by source and tag. Pure bookkeeping, one per rank.

A message goes to the earliest posted receive that accepts its source and tag. A receive takes the
earliest message, arrived or arriving, that it accepts. So messages of one (source, tag) are
received in the order in which they were sent, whatever other tags do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from impl.transport.base import ANY_SOURCE

_Receive = TypeVar("_Receive")


@dataclass(slots=True, eq=False)
class IncomingMessage(Generic[_Receive]):
    """A message that is arriving, or that arrived before its receive was posted."""

    source: int
    tag: int
    nbytes: int
    receive: _Receive | None = None
    arrived_nbytes: int = 0
    body: Tensor | None = None  # (nbytes,) uint8, while there is no receive for it
    unwanted: bool = False  # its receive failed: the rest of it is thrown away

    @property
    def is_complete(self) -> bool:
        return self.arrived_nbytes == self.nbytes


class Matcher(Generic[_Receive]):
    """Posted receives and unexpected messages."""

    def __init__(self) -> None:
        self._posted: list[tuple[int, int, _Receive]] = []  # source, tag; in order of posting
        self._unexpected: list[IncomingMessage[_Receive]] = []  # in order of arrival

    def post(self, source: int, tag: int, receive: _Receive) -> IncomingMessage[_Receive] | None:
        """The message that was waiting for this receive; it may still be arriving. None: posted."""
        for message in self._unexpected:
            if message.tag == tag and source in (ANY_SOURCE, message.source):
                self._unexpected.remove(message)
                message.receive = receive
                return message
        self._posted.append((source, tag, receive))
        return None

    def arrive(self, source: int, tag: int, nbytes: int) -> IncomingMessage[_Receive]:
        """A message begins to arrive. Its `receive` is None if nothing was posted for it."""
        message: IncomingMessage[_Receive] = IncomingMessage(source, tag, nbytes)
        for entry in self._posted:
            if entry[1] == tag and entry[0] in (ANY_SOURCE, source):
                self._posted.remove(entry)
                message.receive = entry[2]
                return message
        self._unexpected.append(message)
        return message

    def withdraw(self, receive: _Receive) -> None:
        """The receive has failed; a message for it goes to the next one."""
        self._posted = [entry for entry in self._posted if entry[2] is not receive]

    def awaits(self, source: int) -> bool:
        """Whether a message from this source could find a posted receive."""
        return any(wanted in (ANY_SOURCE, source) for wanted, _, _ in self._posted)

    def posted(self) -> list[_Receive]:
        return [receive for _, _, receive in self._posted]
