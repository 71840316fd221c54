"""Members of a shared-memory group: which have left or died, and how the group ends."""

from __future__ import annotations

from collections.abc import Sequence

from impl import errors
from impl.transport.base import CallInfo
from impl.transport.end_cause import EndCause, Fate
from impl.transport.lent import Lent
from impl.transport.shm import words
from impl.transport.shm.end_cause import FateBoard
from impl.transport.shm.layout import LINE_NBYTES, MappingLayout
from impl.transport.shm.mapping import Mapping


class Membership:
    """A rank's view of its group: members are ranks, positions are places in the mapping."""

    def __init__(
        self,
        mapping: Mapping,
        layout: MappingLayout,
        members: Sequence[int],
        rank: int,
        world_size: int,
        group: str,
    ) -> None:
        """members: ranks of the group, by position in the mapping; `rank` is one of them.

        world_size: of the group, for messages.
        """
        self.mapping = mapping
        self.layout = layout
        self.members = tuple(members)
        self.rank = rank
        self.position = self.members.index(rank)
        self.size = len(self.members)
        self.world_size = world_size
        self.group = group
        self.board = FateBoard(mapping, layout)
        self.fate: Fate | None = None  # once known: the mapping may be gone when it is asked for
        self.lent: Sequence[Lent] = ()  # the memory of the present collective's tensors
        self._state_indices = [layout.state_offset(p) // 4 for p in range(self.size)]

    def where(self, call: CallInfo) -> str:
        return errors.describe_call(call.operation, call.sequence, self.group)

    def gone(self, positions: Sequence[int]) -> tuple[list[int], list[int]]:
        """Those of the positions that have left the group, or whose process has ended."""
        left = [p for p in positions if self.mapping.u32[self._state_indices[p]]]
        died = [
            p for p in positions if p not in left and not self.mapping.is_present(self.members[p])
        ]
        # what they published before they went is to be read after this
        words.acquire(self.mapping.address)
        return left, died

    def leave(self) -> None:
        """Tell the other ranks that this rank has left."""
        words.fetch_add(self.mapping.address + self.layout.state_offset(self.position), 1)
        self.wake_everybody()

    def offer_arena(self, offer: str, nbytes: int) -> None:
        """Write down, for the others, where this rank's arena can be opened, and its size."""
        text = f"{nbytes} {offer}".encode().ljust(LINE_NBYTES, b"\0")
        offset = self.layout.arena_offset(self.position)
        self.mapping.raw[offset : offset + LINE_NBYTES] = text

    def arena_of(self, position: int) -> tuple[str, int]:
        """Offer and size, as the rank at `position` wrote them."""
        offset = self.layout.arena_offset(position)
        text = bytes(self.mapping.raw[offset : offset + LINE_NBYTES]).rstrip(b"\0").decode()
        nbytes, _, offer = text.partition(" ")
        return offer, int(nbytes)

    def wake_everybody(self) -> None:
        for position in range(self.size):
            for offset in (self.layout.step_offset(position), self.layout.bell_offset(position)):
                words.wake_all(self.mapping.address + offset)

    def give_up(
        self, cause: EndCause, where: str, text: str, lost: Sequence[int] = ()
    ) -> BaseException:
        """Decide the group's fate, or learn it if another rank was faster; returns the error.

        lost: the ranks that are gone, if that is the cause.
        """
        fate = Fate(cause, self.rank, text, tuple(lost))
        if self.board.decide(fate):
            self.wake_everybody()
        error = self.fate_error(where)
        if error is None:  # the rank that was faster died while it wrote
            self.fate = fate
            error = fate.error(where, self.rank, self.world_size)
        return error

    def fate_error(self, where: str) -> BaseException | None:
        """The error to raise if the group has ended, a new one each time."""
        if self.fate is None:
            self.fate = self.board.read()
        return None if self.fate is None else self.fate.error(where, self.rank, self.world_size)

    def raise_fate(self, where: str) -> None:
        """Raise the error of a group that has ended."""
        error = self.fate_error(where)
        if error is not None:
            raise error
