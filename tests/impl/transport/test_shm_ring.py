"""The byte ring from one rank to another: every way to cut and to wrap."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from impl.transport.shm.layout import MappingLayout
from impl.transport.shm.mapping import Mapping
from impl.transport.shm.ring import UNIT_NBYTES, RingReader, RingWriter, padded
from tests.impl.transport.shm_ranks import new_mapping


@pytest.fixture
def memory() -> Iterator[tuple[Mapping, MappingLayout]]:
    mapping, layout = new_mapping(2)
    yield mapping, layout
    mapping.close()


def test_padding() -> None:
    assert [padded(n) for n in (0, 1, UNIT_NBYTES, UNIT_NBYTES + 1)] == [
        0,
        UNIT_NBYTES,
        UNIT_NBYTES,
        2 * UNIT_NBYTES,
    ]


def test_nothing_is_visible_before_it_is_published(memory: tuple[Mapping, MappingLayout]) -> None:
    writer, reader = RingWriter(*memory, 1, 0), RingReader(*memory, 1, 0)
    writer.put_header(7, 0)
    assert reader.available() == 0
    writer.publish()
    assert reader.available() == UNIT_NBYTES
    assert reader.take_header() == (7, 0)
    assert reader.available() == 0


def test_negative_tags_travel(memory: tuple[Mapping, MappingLayout]) -> None:
    writer, reader = RingWriter(*memory, 1, 0), RingReader(*memory, 1, 0)
    writer.put_header(-3, 1 << 40)
    writer.publish()
    assert reader.take_header() == (-3, 1 << 40)


def test_room_comes_back_with_release(memory: tuple[Mapping, MappingLayout]) -> None:
    writer, reader = RingWriter(*memory, 1, 0), RingReader(*memory, 1, 0)
    capacity = memory[1].ring_nbytes
    assert writer.room() == capacity
    writer.put_header(0, 0)
    writer.publish()
    assert writer.room() == capacity - UNIT_NBYTES
    reader.take_header()
    assert writer.room() == capacity - UNIT_NBYTES
    reader.release()
    assert writer.room() == capacity


@pytest.mark.parametrize("nbytes", [1, 15, 16, 17, 4000])
def test_many_messages_go_round(memory: tuple[Mapping, MappingLayout], nbytes: int) -> None:
    writer, reader = RingWriter(*memory, 1, 0), RingReader(*memory, 1, 0)
    out = torch.empty(nbytes, dtype=torch.uint8)
    for number in range(2 * memory[1].ring_nbytes // padded(nbytes + UNIT_NBYTES) + 3):
        payload = torch.full((nbytes,), number % 251, dtype=torch.uint8)
        writer.put_header(number, nbytes)
        writer.put(payload.data_ptr(), nbytes)
        writer.publish()
        assert reader.take_header() == (number, nbytes)
        reader.take(out.data_ptr(), nbytes)
        reader.release()
        assert torch.equal(out, payload)


def test_a_message_may_be_skipped(memory: tuple[Mapping, MappingLayout]) -> None:
    writer, reader = RingWriter(*memory, 1, 0), RingReader(*memory, 1, 0)
    payload = torch.ones(20, dtype=torch.uint8)
    writer.put_header(1, 20)
    writer.put(payload.data_ptr(), 20)
    writer.put_header(2, 0)
    writer.publish()
    reader.take_header()
    reader.skip(20)
    assert reader.take_header() == (2, 0)


def test_directions_are_independent(memory: tuple[Mapping, MappingLayout]) -> None:
    there, back = RingWriter(*memory, 1, 0), RingReader(*memory, 0, 1)
    there.put_header(1, 0)
    there.publish()
    assert back.available() == 0
