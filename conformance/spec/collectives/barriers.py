"""barrier: what it waits for, repeated, asynchronous, in groups and with a timeout."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

import pytest
import torch.distributed as dist

from conformance import Chapter, Me, Ranks, assert_each_rank, assert_that, world_sizes
from conformance.spec.collectives.store_sync import appears, tick, wait_for_ticks
from conformance.spec.torch_versions import needs_argument
from conformance.spec.waiting import rounds_of_messages

chapter = Chapter("collectives", source="torch 2.13 docs, barrier")


def one_comes_late(me: Me, late: int) -> bool:
    """Whether a rank left before the late one came; told by the late one.

    It is late by more than a barrier takes: a slow backend would leave too early, but later.
    """
    began = time.monotonic()
    dist.barrier()
    took = timedelta(seconds=time.monotonic() - began)
    if me.rank != late:
        tick(me.store, f"coming to {late}", of=me.world_size - 1)
        dist.barrier()
        me.store.set(f"left {late}", "")
        return False
    wait_for_ticks(me.store, f"coming to {late}")  # all of the others are about to enter
    left = appears(me.store, f"left {late}", at_least=2 * took)
    dist.barrier()
    return left


@chapter.must(
    "barrier/waits-for-all",
    "No rank leaves a barrier before every rank has entered it.",
    source="torch 2.13 docs, barrier; torchcomms#3213",
    needs="op:barrier",
)
@world_sizes(2, 3, 5, 6, at_least=2)
def test_nobody_leaves_before_the_last_has_come(ranks: Ranks) -> None:
    for late in range(ranks.world_size):
        left = ranks.run(one_comes_late, late)[late]
        assert_that(not left, f"a rank left the barrier before rank {late} had come", late)


def last_to_first(me: Me, rounds: int) -> list[int]:
    """In each round a rank counts itself, and reads between two barriers how many have."""
    seen = []
    for number in range(rounds):
        me.store.add(f"round {number}", 1)
        dist.barrier()
        seen.append(me.store.add(f"round {number}", 0) + me.store.add(f"round {number + 1}", 0))
        dist.barrier()
    return seen


@chapter.must(
    "barrier/repeated",
    "Several barriers in a row each wait for all ranks: no rank is two barriers ahead of another.",
    needs="op:barrier",
    rests_on="barrier/waits-for-all",
)
@world_sizes(1, 2, 3, 5, at_least=1)
def test_barriers_in_a_row(ranks: Ranks) -> None:
    """Between the barriers of a round all have been counted in it, and none in the next one."""
    n = ranks.world_size
    assert_each_rank(ranks.run(last_to_first, 5), [[n] * 5] * n)


def one_goes_ahead(me: Me) -> tuple[bool, bool]:
    """Of rank 0: whether its barrier was complete alone, and after waiting."""
    if me.rank:
        me.store.wait(["issued"])
        dist.barrier()
        return False, True
    work = dist.barrier(async_op=True)
    early = any(work.is_completed() for _ in rounds_of_messages(me, 20))
    me.store.set("issued", "")
    work.wait()
    return early, work.is_completed()


@chapter.must(
    "barrier/async",
    "barrier with async_op returns before the other ranks have joined in; its wait does not.",
    needs=("op:barrier", "feature:nonblocking"),
    rests_on="barrier/waits-for-all",
)
@world_sizes(2, 3)
def test_an_asynchronous_barrier(ranks: Ranks) -> None:
    assert_each_rank(ranks.run(one_goes_ahead), [(False, True)] * ranks.world_size)


def two_at_once(me: Me) -> tuple[bool, bool]:
    """Of rank 0: whether its second barrier was complete when all had entered one, and two."""
    if me.rank:
        dist.barrier()
        if me.store.get("early") == b"False":
            dist.barrier()
        return False, True
    first, second = dist.barrier(async_op=True), dist.barrier(async_op=True)
    first.wait()
    early = any(second.is_completed() for _ in rounds_of_messages(me, 20))
    me.store.set("early", str(early))
    second.wait()
    return early, second.is_completed()


@chapter.must(
    "barrier/several-pending",
    "Of several barriers that a rank has issued, each waits until all ranks have entered as many.",
    needs=("op:barrier", "feature:nonblocking"),
    rests_on="barrier/async",
)
@world_sizes(2, 3)
def test_two_pending_barriers(ranks: Ranks) -> None:
    assert_each_rank(ranks.run(two_at_once), [(False, True)] * ranks.world_size)


def in_two_halves(me: Me, halves: Sequence[Sequence[int]]) -> str:
    """The second half enters its barrier only after the first has left its own."""
    groups = [dist.new_group(list(half)) for half in halves]
    if me.rank in halves[0]:
        dist.barrier(groups[0])
        tick(me.store, "left", of=len(halves[0]))
        return "first"
    wait_for_ticks(me.store, "left")
    dist.barrier(groups[1])
    return "second"


@chapter.must(
    "barrier/subgroup",
    "barrier in a group waits only for the members of that group.",
    needs="op:barrier",
    rests_on="barrier/waits-for-all",
)
@world_sizes(4)
@pytest.mark.parametrize("halves", [((1, 3), (0, 2)), ((2,), (0, 1, 3))], ids=str)
def test_a_group_waits_for_its_own_members(ranks: Ranks, halves: Sequence[Sequence[int]]) -> None:
    want = ["first" if rank in halves[0] else "second" for rank in range(4)]
    assert_each_rank(ranks.run(in_two_halves, halves), want)


def one_never_comes(me: Me) -> str:
    """The error of rank 0."""
    group = dist.new_group()
    words = ""
    if me.rank == 0:
        try:
            dist.barrier(group, timeout=timedelta(milliseconds=100))
        except RuntimeError as error:
            words = str(error)
        me.store.set("over", "")
    me.store.wait(["over"])
    return words


@chapter.must(
    "barrier/timeout",
    "barrier with a timeout raises a RuntimeError on a rank whose peers have not entered it by "
    "then.",
    needs=("op:barrier", "feature:timeouts"),
    rests_on="barrier/waits-for-all",
)
@world_sizes(2, 3)
@needs_argument(dist.barrier, "timeout")
def test_a_barrier_with_a_timeout(ranks: Ranks) -> None:
    words = ranks.run(one_never_comes)[0]
    assert_that("timed out" in words.lower(), f"rank 0's barrier ended with {words!r}", 0)
