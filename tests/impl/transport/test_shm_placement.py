"""Placement of ranks on processors: those that share one unnecessarily move apart."""

from __future__ import annotations

import itertools
import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from impl.transport.shm import placement
from impl.transport.shm.placement import ProcessorPlacement, better_processor


@pytest.mark.parametrize(
    ("places", "position", "allowed", "there"),
    [
        ([0, 0], 1, {0, 1}, 1),
        ([0, 0], 0, {0, 1}, None),  # the last one goes
        ([0, 1], 1, {0, 1}, None),
        ([0, 0], 1, {0}, None),
        ([0, 0], 1, {0, 1, 2}, 1),
        ([1, 1, 0], 1, {0, 1}, None),  # two and one are as even as it gets
        ([0, 0, 0, 0], 3, {0, 1}, 1),
        ([0, 0, 0, 1], 2, {0, 1}, 1),
        ([None, 0, 0], 2, {0, 3}, 3),
        ([0, 0], 1, set(), None),
    ],
)
def test_where_a_rank_goes(
    places: list[int | None], position: int, allowed: set[int], there: int | None
) -> None:
    assert better_processor(places, position, allowed) == there


@given(
    places=st.lists(st.integers(0, 3), min_size=1, max_size=9),
    processors=st.sets(st.integers(0, 3), min_size=1),
)
def test_ranks_that_move_one_by_one_come_to_rest_evenly(
    places: list[int], processors: set[int]
) -> None:
    places = [place if place in processors else min(processors) for place in places]
    for _ in range(len(places) ** 2):
        moves = {
            p: there
            for p in range(len(places))
            if (there := better_processor(places, p, processors)) is not None
        }
        if not moves:
            break
        position, there = moves.popitem()
        places[position] = there
    counts = [places.count(processor) for processor in processors]
    assert max(counts) - min(counts) <= 1


class Machine:
    """Where this process runs, and how often it asked to run elsewhere."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.processor = 0
        self.allowed = {0, 1}
        self.moves: list[set[int]] = []
        monkeypatch.setattr(placement, "current_processor", lambda: self.processor)
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(self.allowed))
        monkeypatch.setattr(os, "sched_setaffinity", lambda _, to: self.moves.append(set(to)))
        self.words = memoryview(bytearray(8)).cast("I")
        self.first, self.second = (ProcessorPlacement(self.words, [0, 1], p) for p in (0, 1))

    def both_wait(self, times: int = 1) -> None:
        """Every millisecond, for each other."""
        for _ in range(times):
            self.first.waits_for(1)
            self.second.waits_for(0)
            self.now_s += 0.001


def test_a_rank_moves_with_its_affinity_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    machine.both_wait(2)
    assert machine.moves == [{1}, {0, 1}]
    assert list(machine.words) == [1, 2]
    machine.processor = 1
    machine.second.waits_for(0)
    assert len(machine.moves) == 2


def test_a_rank_does_not_move_for_what_the_other_wrote_down_long_ago(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(monkeypatch)
    machine.first.note()
    machine.second.waits_for(0)
    machine.now_s += 0.001
    machine.processor = 1
    machine.first.note()
    machine.processor = 0
    machine.second.waits_for(0)
    machine.now_s += 1.0
    machine.processor = 1
    machine.second.waits_for(0)  # the first time again
    assert not machine.moves


def test_an_interrupted_move_leaves_the_affinity_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(monkeypatch)
    asked = []

    def interrupt(thread: int, to: set[int]) -> None:
        asked.append(to)
        if len(asked) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "sched_setaffinity", interrupt)
    with pytest.raises(KeyboardInterrupt):
        machine.both_wait(2)
    assert asked == [{1}, {0, 1}]


def test_a_sandbox_may_forbid_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    asked = []

    def refuse(thread: int, to: set[int]) -> None:
        asked.append(to)
        raise PermissionError("not here")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    machine.both_wait(100)
    assert asked == [{1}, {0, 1}]


def test_ranks_stay_where_the_processor_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    machine.processor = -1
    machine.both_wait(100)
    assert not machine.moves


def test_a_rank_that_is_put_back_waits_longer_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    moved_at = []
    for _ in range(20_000):
        before = len(machine.moves)
        machine.both_wait()  # always on processor 0, whatever they asked for
        if len(machine.moves) > before:
            moved_at.append(machine.now_s)
    gaps = [later - earlier for earlier, later in itertools.pairwise(moved_at)]
    assert gaps == sorted(gaps)
    assert len(moved_at) < 12


def test_a_rank_that_was_long_where_it_moved_moves_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    for _ in range(5):
        machine.processor = 0
        machine.both_wait(2)
        machine.processor = 1
        machine.second.note()
        machine.now_s += 0.1
    assert len(machine.moves) == 10
