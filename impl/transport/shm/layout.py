"""Byte offsets in the shared mapping: words, announcements, slots, rings. Pure arithmetic.

    +--------------------+  offset 0: magic and nonce of the mapping, the group's fate
    | front              |
    +--------------------+
    | one block a rank   |  words, the announcements of its two latest collectives, ring ends
    +--------------------+
    | one slot a rank    |  two halves, used by alternate rounds; each half: parts, then results
    +--------------------+
    | world x world      |  rings of bytes for point to point, [destination][source]
    +--------------------+

[Note: rounds and halves] Collectives are made of *rounds*. In a round a rank writes into its own
slot, publishes its step, waits until every rank has published that step, and then reads other
ranks' slots. A slot has two halves and round t uses half t mod 2. A rank that writes in round t
overwrites what it wrote in round t-2; every rank has read that, because every rank has published
step t-1, which it does only after its reads of round t-2. So one wait a round is enough, and a rank
may run ahead of the slowest by one round.

Nothing here grows with the tensors: a large tensor goes through the slots in segments.
"""

from __future__ import annotations

from dataclasses import dataclass

from impl.schedules.arithmetic import ceil_div, round_up

LINE_NBYTES = 128  # two cache lines of 64: adjacent-line prefetch and big Arm cores share pairs
PAGE_NBYTES = 4096
ANNOUNCEMENT_NBYTES = 384

_MAPPING_NBYTES_PER_RANK = 8 << 20  # so that 4 ranks stay within 32 MiB
_MAPPING_NBYTES_MAX = 512 << 20
_RING_NBYTES_MIN, _RING_NBYTES_MAX = 4 << 10, 1 << 20
_FATE_NBYTES = 2048


def power_of_two_below(value: int) -> int:
    return 1 << (value.bit_length() - 1)


@dataclass(frozen=True, slots=True)
class MappingLayout:
    """Offsets in bytes from the start of the mapping; every one of them a multiple of a line."""

    world_size: int
    segment_nbytes: int  # parts of one half of a slot: the bytes that one round can move
    ring_nbytes: int  # a power of two

    @staticmethod
    def plan(world_size: int, segment_nbytes: int) -> MappingLayout:
        """The largest rings and segments, up to `segment_nbytes`, that stay within the bounds."""
        total = min(_MAPPING_NBYTES_PER_RANK * world_size, _MAPPING_NBYTES_MAX)
        ring = power_of_two_below(max(total // 4 // world_size**2, 1))
        half = total * 5 // 8 // (2 * world_size)
        return MappingLayout(
            world_size=world_size,
            segment_nbytes=max(
                PAGE_NBYTES, min(segment_nbytes, half * 4 // 5) // PAGE_NBYTES * PAGE_NBYTES
            ),
            ring_nbytes=min(max(ring, _RING_NBYTES_MIN), _RING_NBYTES_MAX),
        )

    # -- front

    nonce_offset = 0  # 32 bytes
    fate_claim_offset = LINE_NBYTES  # word: how many ranks tried to decide the group's fate
    fate_ready_offset = LINE_NBYTES + 4  # word: not 0 once the fate can be read
    fate_text_offset = 2 * LINE_NBYTES
    fate_text_nbytes = _FATE_NBYTES

    @property
    def front_nbytes(self) -> int:
        return round_up(self.fate_text_offset + self.fate_text_nbytes, PAGE_NBYTES)

    # -- blocks

    @property
    def _block_nbytes(self) -> int:
        ring_ends = self.world_size * 2 * LINE_NBYTES
        return 4 * LINE_NBYTES + 2 * ANNOUNCEMENT_NBYTES + ring_ends

    def _block(self, rank: int) -> int:
        return self.front_nbytes + rank * self._block_nbytes

    def step_offset(self, rank: int) -> int:
        """Word: the rounds that the rank has published; the word behind it counts sleepers."""
        return self._block(rank)

    def processor_offset(self, rank: int) -> int:
        """Word: the processor on which the rank last waited, plus 1; on the line of its step."""
        return self._block(rank) + 8

    def bell_offset(self, rank: int) -> int:
        """Word: rung when one of the rank's rings changes; the word behind it counts sleepers."""
        return self._block(rank) + LINE_NBYTES

    def state_offset(self, rank: int) -> int:
        """Word: 0 while the rank is a member, 1 once it has left."""
        return self._block(rank) + 2 * LINE_NBYTES

    def arena_offset(self, rank: int) -> int:
        """A line: the size and the offer of the rank's arena, once its peers are to map it."""
        return self._block(rank) + 3 * LINE_NBYTES

    def announcement_offset(self, rank: int, half: int) -> int:
        return self._block(rank) + 4 * LINE_NBYTES + half * ANNOUNCEMENT_NBYTES

    def ring_tail_offset(self, destination: int, source: int) -> int:
        """Word: bytes that the source has put into the ring, modulo 2^32."""
        ends = self._block(destination) + 4 * LINE_NBYTES + 2 * ANNOUNCEMENT_NBYTES
        return ends + source * 2 * LINE_NBYTES

    def ring_head_offset(self, destination: int, source: int) -> int:
        """Word: bytes that the destination has taken out of the ring, modulo 2^32."""
        return self.ring_tail_offset(destination, source) + LINE_NBYTES

    # -- slots

    @property
    def result_nbytes(self) -> int:
        """Room for one rank's chunk of a segment, reduced."""
        return round_up(ceil_div(self.segment_nbytes, self.world_size), LINE_NBYTES)

    @property
    def _half_nbytes(self) -> int:
        return round_up(self.segment_nbytes + self.result_nbytes, PAGE_NBYTES)

    def _slots(self) -> int:
        return round_up(self._block(self.world_size), PAGE_NBYTES)

    def parts_offset(self, rank: int, half: int) -> int:
        return self._slots() + (2 * rank + half) * self._half_nbytes

    def result_offset(self, rank: int, half: int) -> int:
        return self.parts_offset(rank, half) + self.segment_nbytes

    # -- rings

    def ring_offset(self, destination: int, source: int) -> int:
        rings = self._slots() + 2 * self.world_size * self._half_nbytes
        return rings + (destination * self.world_size + source) * self.ring_nbytes

    @property
    def total_nbytes(self) -> int:
        return self.ring_offset(self.world_size, 0)
