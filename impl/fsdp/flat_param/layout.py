"""Offsets of original parameters in a flat parameter, its padding, and each rank's shard of it.

Pure arithmetic on element counts: no tensors, no process groups. The results are torch's, so that
ranks which run torch's FSDP and ranks which run this one can share a job.

Three parameters of 5, 3 and 4 elements, aligned to 4 elements, for 3 ranks; `.` is padding:

    index      0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15 16 17
    content    a  a  a  a  a  .  .  .  b  b  b  .  c  c  c  c  .  .
    rank       0  0  0  0  0  0  1  1  1  1  1  1  2  2  2  2  2  2

Without alignment (`use_orig_params=False`) the flat parameter has 12 elements and nothing is
padded. If the world size does not divide the flat parameter, the last chunks are padded to the
length of the first; a rank may hold nothing but padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

# TorchInductor wants the address of a parameter on a 16-byte boundary.
ALIGNMENT_NBYTES = 16


@dataclass(frozen=True)
class Segment:
    """A run of elements of the flat parameter: one original parameter, or padding."""

    offset: int
    numel: int
    is_padding: bool

    @property
    def end(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True)
class FlatLayout:
    """The unsharded flat parameter as a sequence of segments, without the padding for chunking."""

    segments: tuple[Segment, ...]

    @property
    def numel(self) -> int:
        return self.segments[-1].end if self.segments else 0

    @cached_property
    def params(self) -> tuple[Segment, ...]:
        """One segment for each original parameter, in order."""
        return tuple(s for s in self.segments if not s.is_padding)

    @cached_property
    def split_numels(self) -> list[int]:
        return [s.numel for s in self.segments]


@dataclass(frozen=True)
class ParamInShard:
    """The part of one original parameter that a rank holds.

    `offset_in_shard` indexes the rank's shard, `start` and `end` the flattened original parameter
    (`end` is exclusive).
    """

    offset_in_shard: int
    start: int
    end: int

    @property
    def numel(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class ShardLayout:
    """One rank's chunk of the flat parameter.

    Attributes:
        start: index of the chunk's first element in the padded unsharded flat parameter.
        numel: elements of the chunk, padding included; the same on every rank.
        padding_numel: elements at the chunk's end that no other rank needs.
        params: for each original parameter the part in this chunk, or None.
    """

    start: int
    numel: int
    padding_numel: int
    params: tuple[ParamInShard | None, ...]

    @property
    def unpadded_numel(self) -> int:
        return self.numel - self.padding_numel


def alignment_numel(element_nbytes: int) -> int:
    """Elements of `element_nbytes` bytes between two aligned addresses."""
    return ALIGNMENT_NBYTES // element_nbytes


def plan_layout(
    param_numels: Sequence[int], *, alignment: int = 0, world_size: int = 1
) -> FlatLayout:
    """Lay parameters of `param_numels` elements out one behind the other.

    With `alignment` > 0 each parameter starts at a multiple of it, and the whole is padded to a
    multiple of `world_size`, which saves a copy before the gradients are reduce-scattered. With
    `alignment` 0 there is no padding of either kind.
    """
    if alignment < 0:
        raise ValueError(f"Expects non-negative `aligned_numel` but got {alignment}")
    segments: list[Segment] = []
    end = 0

    def append(numel: int, is_padding: bool) -> None:
        nonlocal end
        segments.append(Segment(end, numel, is_padding))
        end += numel

    for numel in param_numels:
        if alignment and end % alignment:
            append(alignment - end % alignment, True)
        append(numel, False)
    if alignment and end % world_size:
        append(world_size - end % world_size, True)
    return FlatLayout(tuple(segments))


def chunk_numel(numel: int, world_size: int) -> int:
    """Elements of each of `world_size` equal chunks that hold `numel` elements."""
    return -(-numel // world_size)


def chunk_bounds(numel: int, rank: int, world_size: int) -> tuple[int, int]:
    """Start and end (exclusive) of the elements that `rank` holds, padding left out."""
    size = chunk_numel(numel, world_size)
    start = min(rank * size, numel)
    return start, min(start + size, numel)


def plan_shard(layout: FlatLayout, rank: int, world_size: int) -> ShardLayout:
    """This rank's chunk when `world_size` ranks share the flat parameter."""
    numel = chunk_numel(layout.numel, world_size)
    start, end = chunk_bounds(layout.numel, rank, world_size)
    return ShardLayout(
        start=rank * numel,
        numel=numel,
        padding_numel=numel - (end - start),
        params=tuple(_part_in_chunk(param, rank * numel, numel) for param in layout.params),
    )


def plan_unsharded(layout: FlatLayout) -> ShardLayout:
    """The "chunk" of a rank that does not shard (`NO_SHARD`): everything."""
    return plan_shard(layout, 0, 1)


def _part_in_chunk(param: Segment, chunk_start: int, numel: int) -> ParamInShard | None:
    first = max(param.offset, chunk_start)
    last = min(param.end, chunk_start + numel)
    if first >= last:
        return None
    return ParamInShard(first - chunk_start, first - param.offset, last - param.offset)
