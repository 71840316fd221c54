"""Step-by-step synchronisation of the ranks: waiting, timeouts, dead peers, mismatched calls.

`Rounds` publishes this rank's step, waits for the others', compares what the ranks announced, and
turns deadlines, dead peers (`PeerLost`) and aborts into errors on every rank. It moves no tensor
data. See [Note: rounds and halves] in layout.py.

[Note: waiting] A waiting rank looks at the word a few times, then lets other threads run between
looks (`sched_yield`), then sleeps in the kernel. Looking is cheapest while the peer runs on another
core; yielding hands the core to the peer when there are more ranks than cores, for a tenth of the
price of a sleep and a wake-up; sleeping costs the others nothing, which matters when the wait is
long, and as soon as another thread computes meanwhile (`transport.background`). A rank yields for
several times what a small collective of more ranks than cores takes: with less, one rank that is
late sends the others to sleep, their wake-ups make the next one late, and the group stays slow. A
sleeper wakes up now and then to see whether the peer is alive.
"""

from __future__ import annotations

import functools
import hashlib
import struct
import time
from collections.abc import Callable, Sequence

from torch import Tensor

from impl import errors
from impl.transport.background import is_background
from impl.transport.base import CallInfo, Deadline, exchange_of
from impl.transport.end_cause import EndCause
from impl.transport.lent import Lent
from impl.transport.shm import words
from impl.transport.shm.layout import ANNOUNCEMENT_NBYTES
from impl.transport.shm.membership import Membership
from impl.transport.shm.placement import ProcessorPlacement

LOOKS = 40  # about 2 us
YIELDING_S = 2e-3
PLACE_EVERY = 16  # rounds, a power of two: how often a rank that need not wait says where it runs
CHECK_EVERY_S = 0.1  # how long a sleeper goes without looking for dead peers

# digest of operation and signature, the group's sequence number, digest of sizes; then, in some
# calls (see `registered.py`), the offset of the input in its rank's arena, and a verdict
_ANNOUNCEMENT = struct.Struct("<QqQQQ")
_SIZES, _INPUT, _VERDICT = 2, 3, 4  # indices
_TEXT_LENGTH = struct.Struct("<H")
_TEXT_NBYTES = ANNOUNCEMENT_NBYTES - _ANNOUNCEMENT.size - _TEXT_LENGTH.size


class Rounds:
    """The steps of one rank. Only one thread at a time may call it."""

    def __init__(self, membership: Membership) -> None:
        layout, mapping = membership.layout, membership.mapping
        self._membership = membership
        self._mapping = mapping
        self._u32 = mapping.u32
        own = membership.position
        self._own_address = mapping.address + layout.step_offset(own)
        self._own_sleepers = layout.step_offset(own) // 4 + 1
        self._others = [
            (p, layout.step_offset(p) // 4, mapping.address + layout.step_offset(p))
            for p in range(membership.size)
            if p != own
        ]
        self._announcements = [  # [half][position]: offsets
            [layout.announcement_offset(p, half) for p in range(membership.size)] for half in (0, 1)
        ]
        self._digest_indices = [  # [half]: of the others' announcements, in `u64`
            [layout.announcement_offset(p, half) // 8 for p, _, _ in self._others]
            for half in (0, 1)
        ]
        self._wake_always = not words.LOADS_ARE_ORDERED
        self._placement = ProcessorPlacement(
            mapping.u32,
            [layout.processor_offset(p) // 4 for p in range(membership.size)],
            own,
        )
        self.step = 0  # published rounds
        self._digest = 0  # of what was announced last
        self._texts = [b"", b""]  # what this rank's announcements say now, by half

    def half(self) -> int:
        """Which half of the slot the next round uses."""
        return (self.step + 1) & 1

    def announce(self, call: CallInfo, tensors: Sequence[Tensor] = (), sizes: int = 0) -> None:
        """Publish what this rank calls, for the first round of a collective.

        tensors: those that it uses; the rounds look whether their memory is still there.
        sizes: a digest of sizes that may differ between ranks; 0 if they have none in common.
        Raises MemoryGone.
        """
        if tensors:
            self._membership.lent = [Lent(tensor) for tensor in tensors if tensor.numel()]
        self._digest, text = _encode(call.operation, call.signature, call.shown)
        half = (self.step + 1) & 1
        offset = self._announcements[half][self._membership.position]
        mapping = self._mapping
        u64, index = mapping.u64, offset >> 3
        u64[index] = self._digest
        u64[index + 1] = call.sequence
        u64[index + _SIZES] = sizes
        if self._texts[half] is not text:
            offset += _ANNOUNCEMENT.size
            mapping.raw[offset : offset + len(text)] = text
            self._texts[half] = text

    def announce_input(self, offset: int) -> None:
        """Publish where this rank's input lies, with the next round. Large calls alone do it."""
        self._tell(_INPUT, offset)

    def announce_verdict(self, verdict: int) -> None:
        self._tell(_VERDICT, verdict)

    def _tell(self, index: int, value: int) -> None:
        offset = self._announcements[self.half()][self._membership.position]
        self._mapping.u64[(offset >> 3) + index] = value

    def announced_inputs(self) -> list[int]:
        """By position, after the round with which they were published."""
        return self._told(_INPUT)

    def announced_verdicts(self) -> list[int]:
        return self._told(_VERDICT)

    def _told(self, index: int) -> list[int]:
        u64 = self._mapping.u64
        return [u64[(offset >> 3) + index] for offset in self._announcements[self.step & 1]]

    def meet(self, call: CallInfo, until: Deadline) -> None:
        """Publish the next step, and wait until every rank has published it.

        Raises MemoryGone if the memory of a tensor went meanwhile.
        """
        previous = self.step
        self.step = (previous + 1) & 0xFFFFFFFF
        if not previous & (PLACE_EVERY - 1):
            self._placement.note()
        words.fetch_add(self._own_address, 1)
        shared = self._u32
        if shared[self._own_sleepers] or self._wake_always:
            words.wake_all(self._own_address)
        for position, index, address in self._others:
            # a peer is at the previous step, at this one, or, having seen ours, one further
            if shared[index] == previous:
                self._wait(position, index, address, previous, call, until)
            if self._wake_always:
                words.acquire(address)
        for lent in self._membership.lent:
            lent.check()

    def compare(self, call: CallInfo) -> None:
        """After the first round: raise CollectiveMismatch unless all ranks announced the same."""
        half = self.step & 1
        u64 = self._mapping.u64
        for index in self._digest_indices[half]:
            if u64[index] != self._digest:
                raise self._mismatch(call, half)

    def same_sizes(self, sizes: int) -> bool:
        """After the first round: whether all ranks announced these sizes, and some at all."""
        u64 = self._mapping.u64
        return sizes != 0 and all(
            u64[index + _SIZES] == sizes for index in self._digest_indices[self.step & 1]
        )

    def _mismatch(self, call: CallInfo, half: int) -> errors.CollectiveMismatch:
        announced = [self._read_announcement(offset) for offset in self._announcements[half]]
        same = len({operation for operation, _, _ in announced}) == 1
        operation = call.operation if same else "collective"
        return errors.CollectiveMismatch(
            errors.mismatch_message(
                errors.describe_call(operation, call.sequence, self._membership.group),
                [operation for operation, _, _ in announced],
                [signature for _, signature, _ in announced],
                [shown for _, _, shown in announced],
            )
        )

    def _read_announcement(self, offset: int) -> tuple[str, str, str]:
        raw = self._mapping.raw
        start = offset + _ANNOUNCEMENT.size
        nbytes = _TEXT_LENGTH.unpack(raw[start : start + _TEXT_LENGTH.size])[0]
        start += _TEXT_LENGTH.size
        text = bytes(raw[start : start + nbytes]).decode(errors="replace")
        operation, signature, shown = [*text.split("\n", 2), "", ""][:3]
        return operation, signature, shown

    # -- waiting

    def _wait(
        self, position: int, index: int, address: int, value: int, call: CallInfo, until: Deadline
    ) -> None:
        """Return once the word differs from `value`."""
        shared = self._u32
        for _ in range(LOOKS):
            if shared[index] != value:
                return
        if not is_background():
            self._placement.waits_for(position)
            yield_processor, now = words.yield_processor, time.monotonic
            stop_s = now() + YIELDING_S
            while now() < stop_s:
                for _ in range(4):
                    yield_processor()
                    if shared[index] != value:
                        return
        sleep_until_change(
            lambda: shared[index] != value,
            address,
            value,
            lambda: self._check(position, call, until),
            until,
        )

    def _check(self, position: int, call: CallInfo, until: Deadline) -> None:
        """Raise if waiting for this position has become pointless."""
        membership = self._membership
        where = membership.where(call)
        membership.raise_fate(where)
        left, died = membership.gone([position])
        if (left or died) and self._is_behind(position):
            how = "it left the group" if left else "its process ended"
            lost = [membership.members[position]]
            text = errors.peer_lost_message(where, lost, membership.world_size, how)
            raise membership.give_up(EndCause.LOST, where, text, lost)
        if time.monotonic() >= until.at_s:
            text = errors.timeout_message(
                where,
                call.operation,
                until.timeout_s,
                membership.rank,
                membership.world_size,
                self._describe_missing(),
            )
            raise membership.give_up(EndCause.TIMEOUT, where, text)

    def _is_behind(self, position: int) -> bool:
        index = self._membership.layout.step_offset(position) // 4
        return self._u32[index] == (self.step - 1) & 0xFFFFFFFF

    def _describe_missing(self) -> str:
        """`ranks 2, 3 have not joined (rank 2 last called barrier #16; ...)`."""
        missing = [p for p, _, _ in self._others if self._is_behind(p)]
        if not missing:
            return "the last rank joined at that moment"
        members = self._membership.members
        verb = "has" if len(missing) == 1 else "have"
        last = []
        for position in missing:
            number, operation = self._newest_announced(position)
            if operation:
                last.append(f"rank {members[position]} last called {operation} #{number}")
        detail = f" ({'; '.join(last)})" if last else ""
        return f"{errors.list_ranks([members[p] for p in missing])} {verb} not joined{detail}"

    def _newest_announced(self, position: int) -> tuple[int, str]:
        """Number and operation of its last call; (0, "") if there was none.

        It lies in either half: only the first round of a call announces it.
        """
        found = [(0, "")]
        for half in self._announcements:
            offset = half[position]
            header = self._mapping.raw[offset : offset + _ANNOUNCEMENT.size]
            operation = self._read_announcement(offset)[0]
            if operation:
                found.append((_ANNOUNCEMENT.unpack(header)[1], operation))
        return max(found)


def sleep_until_change(
    changed: Callable[[], bool],
    address: int,
    value: int,
    check: Callable[[], None],
    until: Deadline,
) -> None:
    """Sleep on a word (its sleepers are counted in the next one) until `changed`.

    `check` is called before the first sleep and every CHECK_EVERY_S; it raises to end the wait.
    """
    sleepers = address + 4
    while not changed():
        check()
        if changed():
            return
        words.fetch_add(sleepers, 1)
        try:
            remaining_s = until.at_s - time.monotonic()
            words.sleep_while(address, value, max(0.0005, min(CHECK_EVERY_S, remaining_s)))
        finally:
            words.fetch_add(sleepers, -1)


@functools.lru_cache(maxsize=4096)
def _encode(operation: str, signature: str, shown: str) -> tuple[int, bytes]:
    """Digest and text of an announcement."""
    identity = f"{exchange_of(operation)}\n{signature}"
    digest = hashlib.blake2b(identity.encode(), digest_size=8).digest()
    text = f"{operation}\n{signature}\n{shown}".encode()[:_TEXT_NBYTES]
    return int.from_bytes(digest, "little"), _TEXT_LENGTH.pack(len(text)) + text
