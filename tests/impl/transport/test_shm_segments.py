"""How tensors are cut into segments."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from impl.transport.shm.layout import MappingLayout
from impl.transport.shm.segments import (
    CACHE_LINE_NBYTES,
    chunk_numel,
    chunk_span,
    part_numel,
    span_count,
    spans,
)


@given(numel=st.integers(0, 500), segment=st.integers(1, 100))
def test_spans_cover_everything_once(numel: int, segment: int) -> None:
    cut = list(spans(numel, segment))
    assert [i for start, stop in cut for i in range(start, stop)] == list(range(numel))
    assert len(cut) == span_count(numel, segment) >= 1
    assert all(stop - start <= segment for start, stop in cut)


def test_nothing_still_takes_a_round() -> None:
    assert list(spans(0, 10)) == [(0, 0)]


@given(
    numel=st.integers(0, 5000),
    world_size=st.integers(1, 70),
    itemsize=st.sampled_from([1, 2, 4, 8, 16]),
)
def test_chunks_cover_a_segment_once_in_order(numel: int, world_size: int, itemsize: int) -> None:
    cut = [chunk_span(numel, world_size, itemsize, owner) for owner in range(world_size)]
    assert [i for start, stop in cut for i in range(start, stop)] == list(range(numel))
    for start, stop in cut:
        assert start == numel or start * itemsize % CACHE_LINE_NBYTES == 0
        assert stop - start <= chunk_numel(numel, world_size, itemsize)


def test_the_example_in_the_docstring() -> None:
    cut = [chunk_span(40, 4, 4, owner) for owner in range(4)]
    assert cut == [(0, 16), (16, 32), (32, 40), (40, 40)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8, 64])
@pytest.mark.parametrize("segment_nbytes", [4096, 20480, 1 << 20])
@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_what_is_cut_fits_where_it_goes(
    world_size: int, segment_nbytes: int, itemsize: int
) -> None:
    layout = MappingLayout.plan(world_size, segment_nbytes)
    numel = layout.segment_nbytes // itemsize
    assert chunk_numel(numel, world_size, itemsize) * itemsize <= layout.result_nbytes
    room = part_numel(layout.segment_nbytes, world_size, itemsize)
    assert room >= 1
    assert room * world_size * itemsize <= layout.segment_nbytes
