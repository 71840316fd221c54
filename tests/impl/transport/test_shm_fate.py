"""How a group on shared memory ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from impl import errors
from impl.transport.end_cause import EndCause, Fate
from impl.transport.shm import words
from impl.transport.shm.end_cause import FateBoard
from impl.transport.shm.layout import MappingLayout
from impl.transport.shm.mapping import Mapping
from impl.transport.shm.membership import Membership
from tests.impl.transport.shm_ranks import new_mapping


@pytest.fixture
def memory() -> Iterator[tuple[Mapping, MappingLayout]]:
    mapping, layout = new_mapping(3)
    yield mapping, layout
    mapping.close()


def member(memory: tuple[Mapping, MappingLayout], rank: int) -> Membership:
    return Membership(*memory, range(3), rank, 3, "g")


def test_the_first_rank_that_gives_up_decides(memory: tuple[Mapping, MappingLayout]) -> None:
    first = member(memory, 0).give_up(
        EndCause.LOST, "all_reduce #1", "all_reduce #1: lost rank 1 of 3"
    )
    second = member(memory, 2).give_up(EndCause.TIMEOUT, "all_reduce #1", "too late")
    assert type(first) is type(second) is errors.PeerLost
    assert str(first) == "all_reduce #1: lost rank 1 of 3"
    assert str(second) == (
        "all_reduce #1, rank 2 of 3: rank 0 gave up. all_reduce #1: lost rank 1 of 3"
    )


def test_a_rank_waits_for_one_that_is_about_to_write_its_reason(
    memory: tuple[Mapping, MappingLayout], monkeypatch: pytest.MonkeyPatch
) -> None:
    claimed = threading.Event()
    add = words.fetch_add

    def slow_add(address: int, amount: int) -> int:
        before = add(address, amount)
        if threading.current_thread() is writer:
            claimed.set()
            time.sleep(0.05)
        return before

    monkeypatch.setattr(words, "fetch_add", slow_add)
    board = FateBoard(*memory)
    writer = threading.Thread(
        target=board.decide, args=(Fate(EndCause.LOST, 0, "lost rank 1 of 3"),)
    )
    writer.start()
    assert claimed.wait(30)
    error = member(memory, 2).give_up(EndCause.TIMEOUT, "all_reduce #1", "too late")
    writer.join()
    assert isinstance(error, errors.PeerLost)
    assert "lost rank 1 of 3" in str(error)


def test_a_rank_that_died_while_it_wrote_its_reason_keeps_nobody(
    memory: tuple[Mapping, MappingLayout],
) -> None:
    mapping, layout = memory
    words.fetch_add(mapping.address + layout.fate_claim_offset, 1)
    one = member(memory, 2)
    error = one.give_up(EndCause.LOST, "all_reduce #1", "all_reduce #1: lost rank 0 of 3")
    assert isinstance(error, errors.PeerLost)
    again = one.fate_error("all_reduce #2")
    assert type(again) is type(error)
    assert str(again) == f"all_reduce #2, rank 2 of 3: {error}"
    assert again is not error  # whose traceback holds what the call that raised it worked on
