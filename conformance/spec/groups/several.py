"""Operations in several groups at the same time, and sequence numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
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
    deadline,
    world_sizes,
)
from conformance.oracle.collectives import COLLECTIVES, Call
from conformance.spec.collectives.kinds import claimed
from conformance.spec.collectives.perform import perform
from conformance.spec.groups.membership_sums import mark, sum_marks, sum_of_marks
from conformance.spec.waiting import all_are_here
from conformance.torch_private import sequence_number

chapter = Chapter("groups", source="test_c10d_common.py, sequence numbers")


@dataclass(frozen=True)
class Program:
    """Groups, and reductions in them in the order in which every member issues its own.

    groups: the members of each.
    issued: for each reduction, the number of its group.
    waits: for each rank, the order in which it waits; numbers of others' reductions are skipped.
    """

    groups: list[list[int]]
    issued: list[int]
    waits: list[list[int]]


def run_program(me: Me, program: Program) -> dict[int, Tensor]:
    """Every reduction of this rank is under way before the first is waited for."""
    groups = [dist.new_group(members) for members in program.groups]
    tensors: dict[int, Tensor] = {}
    works: dict[int, Any] = {}
    for number, index in enumerate(program.issued):
        if me.rank in program.groups[index]:
            tensors[number] = mark(me) * (number + 1)
            works[number] = dist.all_reduce(tensors[number], group=groups[index], async_op=True)
    for number in program.waits[me.rank]:
        if number in works:
            works[number].wait()
    return tensors


def _results(program: Program, world_size: int) -> list[dict[int, Tensor]]:
    return [
        {
            number: sum_of_marks(program.groups[index]) * (number + 1)
            for number, index in enumerate(program.issued)
            if rank in program.groups[index]
        }
        for rank in range(world_size)
    ]


@chapter.must(
    "groups/several-at-once",
    "Operations in progress in several groups at once, overlapping groups included, do not mix, "
    "whatever the order in which their handles are waited for.",
    source="torch 2.13 docs, new_group: 'Safe concurrent usage'",
    rests_on="new_group/members",
)
@world_sizes(2, 3, 4, at_least=2)
def test_overlapping_groups_at_once(ranks: Ranks) -> None:
    n = ranks.world_size
    groups = [list(range(n)), list(range(1, n)), list(range(n - 1)), [0, n - 1]]
    issued = [0, 1, 2, 3, 2, 0, 3, 1, 1, 0]
    backwards = list(reversed(range(len(issued))))
    program = Program(groups, issued, [backwards] * n)
    assert_each_rank(ranks.run(run_program, program), _results(program, n))


@st.composite
def programs(draw: st.DrawFn, world_size: int) -> Program:
    members = st.sets(st.integers(0, world_size - 1), min_size=1).map(sorted)
    groups = draw(st.lists(members, min_size=1, max_size=4))
    issued = draw(st.lists(st.integers(0, len(groups) - 1), max_size=8))
    waits = [draw(st.permutations(range(len(issued)))) for _ in range(world_size)]
    return Program(groups, issued, waits)


@covers("groups/several-at-once")
@world_sizes(2, 3, 4, at_least=2)
@given(data=st.data())
@settings(max_examples=8)
def test_any_groups_at_once(ranks: Ranks, data: st.DataObject) -> None:
    n = ranks.world_size
    program = data.draw(programs(n))
    assert_each_rank(ranks.run(run_program, program), _results(program, n))


def begin_with_another_group(me: Me) -> list[Tensor]:
    """All ranks reduce in as many groups of all as there are ranks, and each begins with another.
    Everything is under way before the first is waited for."""
    groups = [dist.new_group() for _ in range(me.world_size)]
    tensors = [mark(me) * (number + 1) for number in range(me.world_size)]
    order = [*range(me.rank, me.world_size), *range(me.rank)]
    works: list[Any] = [
        dist.all_reduce(tensors[number], group=groups[number], async_op=True) for number in order
    ]
    for work in works:
        work.wait()
    return tensors


@chapter.should(
    "groups/in-any-order",
    "Ranks may issue the operations of several groups in different orders: an operation waits "
    "only for ranks of its own group.",
    source="torch 2.13 docs, new_group: 'Safe concurrent usage' asks for one order with NCCL alone",
    needs="feature:nonblocking",
    rests_on="groups/several-at-once",
)
@world_sizes(2, 3, at_least=2)
@deadline(20)
def test_each_rank_begins_with_another_group(ranks: Ranks) -> None:
    n = ranks.world_size
    want = [sum_of_marks(range(n)) * (number + 1) for number in range(n)]
    assert_same_on_all_ranks(ranks.run(begin_with_another_group), want=want)


def count_differently(me: Me) -> list[Tensor]:
    """Rank r has issued r operations in a group of its own before all meet, three times over."""
    alone = [dist.new_group([rank]) for rank in range(me.world_size)][me.rank]
    ends = dist.new_group([0, me.world_size - 1])
    everybody = dist.new_group()
    seen = []
    for _ in range(3):
        for _ in range(me.rank):
            sum_marks(me, alone)
        x, y = mark(me), mark(me)
        work = dist.all_reduce(x, group=everybody, async_op=True)
        if dist.get_rank(ends) >= 0:
            dist.all_reduce(y, group=ends)
        dist.barrier(group=everybody)
        work.wait()
        seen += [x, y]
    return seen


@chapter.must(
    "groups/different-numbers-of-operations",
    "A group's operations match by their order in that group, however many operations each of "
    "its ranks has issued in other groups.",
    source="derived: one counter for all groups would deliver across them",
    rests_on="groups/several-at-once",
)
@world_sizes(2, 3, 4, at_least=2)
def test_groups_count_their_own_operations(ranks: Ranks) -> None:
    n = ranks.world_size
    everybody, ends = sum_of_marks(range(n)), sum_of_marks({0, n - 1})
    want = [
        [everybody, ends if rank in (0, n - 1) else sum_of_marks([rank])] * 3 for rank in range(n)
    ]
    assert_each_rank(ranks.run(count_differently), want)


def count_operations(me: Me, ops: Sequence[str] = ()) -> list[int]:
    """The number after each of eight collectives, two of them asynchronous, and of these."""
    group = dist.new_group()
    x = mark(me)
    seen = [sequence_number(group)]
    for _ in range(3):
        dist.all_reduce(x, group=group)
        seen.append(sequence_number(group))
    dist.broadcast(x, 0, group=group)
    seen.append(sequence_number(group))
    dist.barrier(group=group)
    seen.append(sequence_number(group))
    dist.all_gather(
        [torch.zeros(3, device=me.device) for _ in range(me.world_size)], x, group=group
    )
    seen.append(sequence_number(group))
    works = [dist.all_reduce(mark(me), group=group, async_op=True)]
    seen.append(sequence_number(group))
    works.append(dist.all_reduce(mark(me), group=group, async_op=True))
    seen.append(sequence_number(group))
    for work in works:
        work.wait()
    for op in ops:
        perform(me, Call(op), group=group)
        seen.append(sequence_number(group))
    return seen


@chapter.must(
    "sequence_numbers/counted",
    "Each collective raises the group's sequence number by one, asynchronous ones when they are "
    "issued.",
    needs="feature:sequence_numbers",
    rests_on="all_reduce/sum",
)
@adapts()
@world_sizes(1, 2, 3)
def test_each_collective_is_counted(ranks: Ranks) -> None:
    # torch's gloo makes a reduce_scatter of one all_reduce for each rank.
    ops = [op for op in claimed(COLLECTIVES, ranks.target) if op != "reduce_scatter"]
    for rank, seen in enumerate(ranks.run(count_operations, ops)):
        steps = [after - before for before, after in pairwise(seen)]
        assert_that(set(steps) == {1}, f"the numbers were {seen}, not one more each time", rank)


@chapter.must(
    "sequence_numbers/agree",
    "A new group's sequence number is the same on all members, and stays so.",
    needs="feature:sequence_numbers",
    rests_on="sequence_numbers/counted",
)
@world_sizes(2, 3, 4, at_least=2)
def test_members_agree_on_the_number(ranks: Ranks) -> None:
    by_rank = ranks.run(count_operations)
    assert_each_rank(by_rank, [by_rank[0]] * ranks.world_size)


def count_two_groups(me: Me) -> list[list[int]]:
    """How far each of two groups moved on while the first and then the second worked.

    Rank 0 is in the first one alone.
    """
    groups = [dist.new_group(), dist.new_group(list(range(1, me.world_size)))]
    mine = groups if me.rank else groups[:1]
    before = [sequence_number(group) for group in mine]
    sum_marks(me, groups[0])
    between = [sequence_number(group) for group in mine]
    for _ in range(2):
        sum_marks(me, groups[1])
    after = [sequence_number(group) for group in mine]
    return [
        [b - a for a, b in zip(before, between, strict=True)],
        [b - a for a, b in zip(between, after, strict=True)],
    ]


@chapter.must(
    "sequence_numbers/of-each-group",
    "Collectives of one group do not change the sequence number of another.",
    needs="feature:sequence_numbers",
    rests_on="sequence_numbers/counted",
)
@world_sizes(2, 3)
def test_each_group_has_its_own_number(ranks: Ranks) -> None:
    got = ranks.run(count_two_groups)
    assert_each_rank(got, [[[1], [0]], *[[[1, 0], [0, 2]]] * (ranks.world_size - 1)])


def fall_behind(me: Me) -> tuple[int, int]:
    """How far the number moved while the last rank held back, and in the end."""
    group = dist.new_group()
    last = me.world_size - 1
    sum_marks(me, group)
    start = sequence_number(group)
    x = mark(me)
    work = None if me.rank == last else dist.all_reduce(x, group=group, async_op=True)
    early = sequence_number(group)
    all_are_here(me, "has looked")
    if work is None:
        dist.all_reduce(x, group=group)
    else:
        work.wait()
    return early - start, sequence_number(group) - start


@chapter.must(
    "sequence_numbers/show-who-is-behind",
    "While some ranks have issued a collective that others have not, their sequence numbers "
    "differ by one.",
    needs="feature:sequence_numbers",
    rests_on="sequence_numbers/agree",
)
@world_sizes(2, 3, 4, at_least=2)
def test_the_number_shows_who_is_behind(ranks: Ranks) -> None:
    n = ranks.world_size
    assert_each_rank(ranks.run(fall_behind), [*[(1, 1)] * (n - 1), (0, 1)])
