"""Order of collectives: many pending or in a row, several groups, reused memory, groups of one."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from conformance import (
    Chapter,
    Me,
    Ranks,
    adapts,
    assert_each_rank,
    assert_same_on_all_ranks,
    assert_that,
    covers,
    needs,
    world_sizes,
)
from conformance.checks import first_difference
from conformance.oracle.collectives import COLLECTIVES, Call
from conformance.oracle.data import sample
from conformance.oracle.reduction import reduced
from conformance.spec.collectives.perform import Seen, assert_taken, perform
from conformance.spec.parameters import ops

chapter = Chapter("collectives")

OFTEN = 300
OFTEN_S = 2.0


def sum_of_all(world_size: int, shape: tuple[int, ...], salt: int) -> Tensor:
    return reduced("sum", [sample(shape, "float32", rank, salt) for rank in range(world_size)])


def waited_for_in_order(me: Me, order: list[int]) -> list[Tensor]:
    """All reductions at once, of one size, so that only their order tells them apart."""
    xs = [sample((6,), "float32", me.rank, salt).to(me.device) for salt in range(len(order))]
    works = [dist.all_reduce(x, async_op=True) for x in xs]
    # Each rank begins elsewhere.
    for index in order[me.rank :] + order[: me.rank]:
        works[index].wait()
    return xs


@chapter.must(
    "order/issued",
    "Collectives of a group match in the order in which they were issued, whatever the order in "
    "which they are waited for.",
    source="torch 2.13 docs, groups; derived",
    rests_on="all_reduce/async",
)
@world_sizes(2, 3, 5, at_least=2)
@pytest.mark.parametrize(
    "order", [[0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [2, 5, 0, 4, 1, 3]], ids=str
)
def test_collectives_match_as_they_were_issued(ranks: Ranks, order: list[int]) -> None:
    n = ranks.world_size
    want = [sum_of_all(n, (6,), salt) for salt in range(len(order))]
    assert_same_on_all_ranks(ranks.run(waited_for_in_order, order), want=want)


def of_all_kinds(me: Me) -> list[Tensor]:
    """Different collectives of different sizes, all pending, the last one waited for first."""
    n, device = me.world_size, me.device
    x = sample((5,), "float32", me.rank, 0).to(device)
    y = sample((3, 2), "int64", me.rank, 1).to(device)
    gathered = [torch.zeros(4, device=device) for _ in range(n)]
    mine = sample((4,), "float32", me.rank, 2).to(device)
    works = [
        dist.all_reduce(x, async_op=True),
        dist.broadcast(y, n - 1, async_op=True),
        dist.all_gather(gathered, mine, async_op=True),
        dist.barrier(async_op=True),
    ]
    for work in reversed(works):
        work.wait()
    return [x, y, *gathered]


@covers("order/issued")
@needs("op:broadcast", "op:all_gather", "op:barrier", "dtype:int64")
@world_sizes(2, 3, 5, at_least=2)
def test_collectives_of_all_kinds_at_once(ranks: Ranks) -> None:
    n = ranks.world_size
    gathered = [sample((4,), "float32", rank, 2) for rank in range(n)]
    want = [sum_of_all(n, (5,), 0), sample((3, 2), "int64", n - 1, 1), *gathered]
    assert_same_on_all_ranks(ranks.run(of_all_kinds), want=want)


def blocking_after_async(me: Me) -> list[Tensor]:
    xs = [sample((4,), "float32", me.rank, salt).to(me.device) for salt in range(3)]
    first = dist.all_reduce(xs[0], async_op=True)
    second = dist.broadcast(xs[1], 0, async_op=True)
    dist.all_reduce(xs[2])
    second.wait()
    first.wait()
    return xs


@chapter.must(
    "order/blocking-after-async",
    "A blocking collective may follow asynchronous ones that have not been waited for yet.",
    source="torch 2.13 docs, synchronous and asynchronous collective operations",
    rests_on="order/issued",
)
@needs("op:broadcast")
@world_sizes(2, 3)
def test_a_blocking_collective_behind_pending_ones(ranks: Ranks) -> None:
    n = ranks.world_size
    want = [sum_of_all(n, (4,), 0), sample((4,), "float32", 0, 1), sum_of_all(n, (4,), 2)]
    assert_same_on_all_ranks(ranks.run(blocking_after_async), want=want)


def many_pending(me: Me) -> Tensor:
    """A hundred one-element reductions, waited for from the last to the first."""
    xs = torch.arange(100.0, device=me.device) * (me.rank + 1)
    works = [dist.all_reduce(x, async_op=True) for x in xs.unbind()]
    for work in reversed(works):
        work.wait()
    return xs


@chapter.must(
    "order/many-pending",
    "A hundred collectives of a group may be pending at once.",
    source="derived",
    rests_on="order/issued",
)
@world_sizes(2, 3)
def test_a_hundred_at_once(ranks: Ranks) -> None:
    n = ranks.world_size
    want = torch.arange(100.0) * (n * (n + 1) / 2)
    assert_same_on_all_ranks(ranks.run(many_pending), want=want)


def reduced_side_by_side(me: Me, count: int) -> Tensor:
    """So many one-element reductions; how often each value came out."""
    xs = torch.full((count,), float(me.rank + 1), device=me.device)
    for work in [dist.all_reduce(x, async_op=True) for x in xs.unbind()]:
        work.wait()
    return torch.bincount(xs.cpu().long(), minlength=8)


def many_in_a_row(me: Me, within_s: float) -> Tensor | None:
    """2,100 reductions, a hundred at a time; None if they would take longer than they may."""
    reduced_side_by_side(me, 10)  # the first ones may take longer than all others
    began = time.monotonic()
    reduced_side_by_side(me, 10)
    if me.rank == 0:
        is_fast = 210 * (time.monotonic() - began) < within_s
        me.store.set("is fast", str(is_fast))
    if me.store.get("is fast") == b"False":
        return None
    seen = torch.zeros(8, dtype=torch.int64)
    for _ in range(21):
        seen += reduced_side_by_side(me, 100)
    return seen


@chapter.must(
    "order/many-in-a-row",
    "A group keeps working after thousands of operations; no counter of them overflows.",
    source="derived: sequence numbers, tags and slots that wrap",
    rests_on="order/many-pending",
)
@world_sizes(2)
def test_two_thousand_in_a_row(ranks: Ranks) -> None:
    got = ranks.run(many_in_a_row, ranks.deadline_s / 2)
    if got == [None] * ranks.world_size:
        pytest.skip("the target is too slow: thousands of operations do not end in time")
    want = torch.zeros(8, dtype=torch.int64)
    want[3] = 2100
    assert_same_on_all_ranks(got, want=want)


def call_often(me: Me, call: Call) -> tuple[Seen, list[int]]:
    """The first of hundreds of calls, or of as many as there is time for; and which of them
    came out otherwise."""
    began = time.monotonic()
    first, *_ = [perform(me, call) for _ in range(10)]
    if me.rank == 0:
        times = 10 * OFTEN_S / (time.monotonic() - began)
        me.store.set("times", str(min(int(times), OFTEN)))
    later = [perform(me, call) for _ in range(int(me.store.get("times")))]
    otherwise = [i for i, seen in enumerate(later, 11) if first_difference(seen, first)]
    return first, otherwise


@covers("order/many-in-a-row")
@world_sizes(2)
@adapts()
@pytest.mark.parametrize("op", ops(*COLLECTIVES))
def test_hundreds_of_an_operation_in_a_row(ranks: Ranks, op: str) -> None:
    call = Call(op, (5,))
    got = ranks.run(call_often, call)
    assert_taken(call, [first for first, _ in got])
    for rank, (_, otherwise) in enumerate(got):
        assert_that(not otherwise, f"{op}: these calls came out otherwise: {otherwise[:9]}", rank)


def in_two_groups(me: Me) -> list[Tensor]:
    """Two groups of the same ranks; each rank issues in them in an order of its own."""
    groups = [dist.new_group(), dist.new_group()]
    xs = [sample((5,), "float32", me.rank, salt).to(me.device) for salt in range(4)]
    # Even ranks: a0 a1 b0 b1. Odd ranks: b0 a0 b1 a1. In each group the order is the same.
    even, odd = [(0, 0), (0, 1), (1, 2), (1, 3)], [(1, 2), (0, 0), (1, 3), (0, 1)]
    order = odd if me.rank % 2 else even
    works = [dist.all_reduce(xs[x], group=groups[g], async_op=True) for g, x in order]
    for work in works:
        work.wait()
    return xs


@chapter.must(
    "order/groups-are-apart",
    "Collectives of different groups never match, whatever the order in which each rank issues "
    "them and however many it has issued in each group before.",
    source="derived",
    needs="feature:nonblocking",
    rests_on="order/issued",
)
@world_sizes(2, 3)
def test_groups_of_the_same_ranks(ranks: Ranks) -> None:
    want = [sum_of_all(ranks.world_size, (5,), salt) for salt in range(4)]
    assert_same_on_all_ranks(ranks.run(in_two_groups), want=want)


CHAIN = [[0, 1], [1, 2], [2, 3]]


def in_a_chain_of_groups(me: Me) -> list[Tensor]:
    """Groups that overlap in one rank; group i has had i collectives before."""
    groups = [dist.new_group(members) for members in CHAIN]
    xs = [sample((4,), "float32", me.rank, salt).to(me.device) for salt in range(3)]
    mine = [i for i, members in enumerate(CHAIN) if me.rank in members]
    for i in mine:
        for _ in range(i):
            dist.barrier(groups[i])
    works = [dist.all_reduce(xs[i], group=groups[i], async_op=True) for i in reversed(mine)]
    for work in works:
        work.wait()
    return [xs[i] for i in mine]


@covers("order/groups-are-apart")
@needs("op:barrier")
@world_sizes(4)
def test_groups_that_overlap(ranks: Ranks) -> None:
    sums = [
        sample((4,), "float32", a, salt) + sample((4,), "float32", b, salt)
        for salt, (a, b) in enumerate(CHAIN)
    ]
    want = [[sums[i] for i, members in enumerate(CHAIN) if rank in members] for rank in range(4)]
    assert_each_rank(ranks.run(in_a_chain_of_groups), want)


def again_and_again(me: Me) -> list[Tensor]:
    """The same tensors in every round, filled anew."""
    x = torch.empty(5, device=me.device)
    gathered = [torch.empty(2, device=me.device) for _ in range(me.world_size)]
    seen = []
    for salt in range(6):
        x.copy_(sample((5,), "float32", me.rank, salt))
        dist.all_reduce(x)
        dist.all_gather(gathered, x[:2] + me.rank)
        seen.append(torch.cat([x, *gathered]))
    return seen


@chapter.must(
    "order/repeated",
    "The same call made again and again on the same tensors gives the right result each time.",
    source="pytorch#43307: wrong from the third time on",
    rests_on="all_reduce/sum",
)
@needs("op:all_gather")
@world_sizes(2, 3)
def test_the_same_call_again_and_again(ranks: Ranks) -> None:
    n = ranks.world_size
    sums = [sum_of_all(n, (5,), salt) for salt in range(6)]
    want = [torch.cat([x, *(x[:2] + rank for rank in range(n))]) for x in sums]
    assert_same_on_all_ranks(ranks.run(again_and_again), want=want)


def in_the_same_memory(me: Me) -> list[Tensor]:
    """Tensors that all begin at one place."""
    memory = torch.zeros(24, device=me.device)
    seen = []
    for salt, numel in enumerate([6, 2, 24, 13]):
        x = memory[:numel]
        x.copy_(sample((numel,), "float32", me.rank, salt))
        dist.all_reduce(x)
        seen.append(x.clone())
    doubles = memory.view(torch.float64)
    doubles.copy_(sample((12,), "float64", me.rank, 4))
    dist.all_reduce(doubles)
    return [*seen, doubles]


@chapter.must(
    "order/same-memory",
    "A tensor may lie where another one, of a different size or dtype, was before.",
    source="derived: memory that is used again, registered by its address",
    rests_on="order/repeated",
)
@needs("dtype:float64")
@world_sizes(2, 3)
def test_tensors_that_begin_at_one_place(ranks: Ranks) -> None:
    n = ranks.world_size
    sums = [sum_of_all(n, (numel,), salt) for salt, numel in enumerate([6, 2, 24, 13])]
    doubles = reduced("sum", [sample((12,), "float64", rank, 4) for rank in range(n)])
    assert_same_on_all_ranks(ranks.run(in_the_same_memory), want=[*sums, doubles])


@chapter.must(
    "order/world-of-one",
    "Every collective works in a group of one rank.",
    source="gloo#154, gloo#209",
)
@pytest.mark.parametrize("op", ops(*COLLECTIVES))
@world_sizes(1)
def test_a_world_of_one(ranks: Ranks, op: str) -> None:
    call = Call(op, (5, 3))
    assert_taken(call, ranks.run(perform, call))
