"""Splits a tensor into segments (one slot) and chunks (one per rank). Pure arithmetic, in elements.

A *segment* is what one round moves. Within a segment that is reduced, rank r owns *chunk* r: it
alone reduces those elements, so all ranks copy the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator

from impl.schedules.arithmetic import ceil_div, round_up

CACHE_LINE_NBYTES = 64


def spans(numel: int, segment_numel: int) -> Iterator[tuple[int, int]]:
    """Consecutive [start, stop) that cover `numel` elements; one empty span for no elements.

    An operation on nothing still takes a round, in which the ranks compare what they called.
    """
    yield 0, min(numel, segment_numel)
    for start in range(segment_numel, numel, segment_numel):
        yield start, min(numel, start + segment_numel)


def span_count(numel: int, segment_numel: int) -> int:
    """How many spans `spans` yields."""
    return max(1, ceil_div(numel, segment_numel))


def chunk_numel(numel: int, world_size: int, itemsize: int) -> int:
    """Elements of a chunk: a whole number of cache lines, so that no line has two writers."""
    line = max(1, CACHE_LINE_NBYTES // itemsize)
    return round_up(ceil_div(numel, world_size), line)


def chunk_span(numel: int, world_size: int, itemsize: int, owner: int) -> tuple[int, int]:
    """[start, stop) of a chunk; later chunks may be empty.

    numel=40 float32 on 4 ranks:  0..16, 16..32, 32..40, 40..40
    """
    chunk = chunk_numel(numel, world_size, itemsize)
    return min(numel, owner * chunk), min(numel, (owner + 1) * chunk)


def part_numel(segment_nbytes: int, world_size: int, itemsize: int) -> int:
    """Elements for each rank when a slot is divided between all of them."""
    part_nbytes = segment_nbytes // world_size // CACHE_LINE_NBYTES * CACHE_LINE_NBYTES
    return part_nbytes // itemsize
