"""The layout of the shared mapping: nothing overlaps, and no size depends on the tensors."""

from __future__ import annotations

import pytest

from impl.transport.shm.layout import ANNOUNCEMENT_NBYTES, LINE_NBYTES, MappingLayout

SEGMENT_NBYTES = 1 << 20
WORLD_SIZES = [1, 2, 3, 4, 7, 8, 16, 64]


def regions(layout: MappingLayout) -> list[tuple[int, int, str]]:
    """(start, stop, name) of everything that ranks write."""
    found = [
        (0, 32, "nonce"),
        (layout.fate_claim_offset, layout.fate_claim_offset + 8, "fate words"),
        (
            layout.fate_text_offset,
            layout.fate_text_offset + layout.fate_text_nbytes,
            "fate text",
        ),
    ]
    for rank in range(layout.world_size):
        found.append((layout.step_offset(rank), layout.step_offset(rank) + 8, f"step {rank}"))
        found.append((layout.bell_offset(rank), layout.bell_offset(rank) + 8, f"bell {rank}"))
        found.append((layout.state_offset(rank), layout.state_offset(rank) + 4, f"state {rank}"))
        for half in (0, 1):
            start = layout.announcement_offset(rank, half)
            found.append((start, start + ANNOUNCEMENT_NBYTES, f"announcement {rank}.{half}"))
            start = layout.parts_offset(rank, half)
            found.append((start, start + layout.segment_nbytes, f"parts {rank}.{half}"))
            start = layout.result_offset(rank, half)
            found.append((start, start + layout.result_nbytes, f"result {rank}.{half}"))
        for source in range(layout.world_size):
            tail = layout.ring_tail_offset(rank, source)
            found.append((tail, tail + 4, f"tail {source}->{rank}"))
            head = layout.ring_head_offset(rank, source)
            found.append((head, head + 4, f"head {source}->{rank}"))
            ring = layout.ring_offset(rank, source)
            found.append((ring, ring + layout.ring_nbytes, f"ring {source}->{rank}"))
    return sorted(found)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_nothing_overlaps_and_all_is_aligned(world_size: int) -> None:
    layout = MappingLayout.plan(world_size, SEGMENT_NBYTES)
    before = (0, 0, "start")
    for region in regions(layout):
        assert region[0] >= before[1], (before, region)
        if region[2] not in ("nonce",):
            assert region[0] % 64 == 0, region
        before = region
    assert before[1] <= layout.total_nbytes


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_words_of_different_writers_share_no_line(world_size: int) -> None:
    layout = MappingLayout.plan(world_size, SEGMENT_NBYTES)
    words = [layout.step_offset(r) for r in range(world_size)]
    words += [layout.bell_offset(r) for r in range(world_size)]
    assert len({offset // LINE_NBYTES for offset in words}) == len(words)


def test_four_ranks_stay_within_32_mib() -> None:
    assert MappingLayout.plan(4, SEGMENT_NBYTES).total_nbytes <= 32 << 20
    assert MappingLayout.plan(4, 1 << 30).total_nbytes <= 32 << 20


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_group_is_bounded_whatever_the_segment(world_size: int) -> None:
    assert MappingLayout.plan(world_size, 1 << 40).total_nbytes <= 600 << 20


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_rings_are_powers_of_two(world_size: int) -> None:
    ring = MappingLayout.plan(world_size, SEGMENT_NBYTES).ring_nbytes
    assert ring & (ring - 1) == 0
    assert ring >= 4096


def test_a_tiny_segment_becomes_a_page() -> None:
    assert MappingLayout.plan(4, 1).segment_nbytes == 4096
