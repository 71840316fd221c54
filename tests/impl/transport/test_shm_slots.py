"""Where in the slots a round writes: see [Note: places] in slots.py."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from impl.transport.shm import ShmCommunicator
from impl.transport.shm.communicator import DEFAULT_SEGMENT_NBYTES
from impl.transport.shm.membership import Membership
from impl.transport.shm.slots import Slots
from tests.impl.transport.combines import SUM
from tests.impl.transport.shm_ranks import call, new_mapping, on_ranks, soon

KIB = 1024


@pytest.fixture
def slots() -> Slots:
    memory = new_mapping(2, DEFAULT_SEGMENT_NBYTES)
    return Slots(Membership(*memory, range(2), 1, 2, "g"))


def starts_of_rank_1(slots: Slots, nbytes: int, rounds: int) -> list[int]:
    """Where rank 1 writes in so many rounds; in which half is checked."""
    found = []
    for slots.rounds.step in range(rounds):
        for position, start in enumerate(slots.place(nbytes)):
            half = slots.parts[slots.rounds.half()][position]
            assert half <= start <= start + nbytes <= half + slots.segment_nbytes
        found.append(slots.place(nbytes)[1])
    return found


@pytest.mark.parametrize("nbytes", [0, 4, 16 * KIB - 1, DEFAULT_SEGMENT_NBYTES])
def test_small_and_large_rounds_use_the_start_of_their_half(slots: Slots, nbytes: int) -> None:
    assert len(set(starts_of_rank_1(slots, nbytes, 100))) == 2


@pytest.mark.parametrize("nbytes", [64 * KIB, 100_000, 256 * KIB, 512 * KIB])
def test_a_place_comes_again_after_a_megabyte(slots: Slots, nbytes: int) -> None:
    starts = starts_of_rank_1(slots, nbytes, 100)
    period = starts.index(starts[0], 1)
    assert period * nbytes >= 1024 * KIB
    assert starts == [starts[number % period] for number in range(100)]
    in_order = sorted(starts[:period])
    assert all(b - a >= nbytes for a, b in itertools.pairwise(in_order))


def test_a_plan_says_where_rounds_of_its_size_write(slots: Slots) -> None:
    plan = slots.plan(torch.float64, 5000)
    assert plan is not None
    for step, start in enumerate(starts_of_rank_1(slots, 40_000, 100), start=1):
        number = step & plan.step_mask
        assert plan.own_addresses[number] == start
        assert [part.data_ptr() for part in plan.parts[number]][1] == start


def test_plans_hold_a_bounded_number_of_views(slots: Slots) -> None:
    for numel in range(4 * KIB, 5 * KIB):
        slots.plan(torch.float32, numel)
    assert sum(len(parts) for plan in slots._plans.values() for parts in plan.parts) <= 512 * 64


def test_results_are_right_in_every_place() -> None:
    numels = [1, 5000, 20_000, 16_384, 100_000, 262_144] * 12

    def work(comm: ShmCommunicator) -> list[Tensor]:
        found = []
        for numel in numels:
            own = torch.full((numel,), comm.rank + numel, dtype=torch.float64)
            gathered = torch.empty(3 * numel, dtype=torch.float64)
            comm.all_gather(gathered, own, call("all_gather"), soon())
            comm.broadcast(own, numel % 3, call("broadcast"), soon())
            comm.all_reduce(own, SUM, call(), soon())
            found += [gathered.view(3, numel)[:, -1].clone(), own[[0, -1]]]
        return found

    for got in on_ranks(3, work, DEFAULT_SEGMENT_NBYTES):
        for numel, gathered, reduced in zip(numels, got[::2], got[1::2], strict=True):
            assert gathered.tolist() == [numel, numel + 1, numel + 2]
            assert reduced.tolist() == [3 * (numel + numel % 3)] * 2
