"""Collectives on large tensors, to 64 MiB and more: any dtype, views, groups, several at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance import Chapter, Me, Ranks, assert_that, covers, needs, world_sizes
from conformance.oracle.collectives import COLLECTIVES, Call, before
from conformance.oracle.layout import Layout
from conformance.spec.collectives.perform import (
    Placement,
    Seen,
    all_gather_into_tensor,
    assert_taken,
    issue,
    perform,
    reduce_scatter_tensor,
    seen_of,
    what_else_changed,
)
from conformance.spec.collectives.strategies import ROOTED, calls, offsets, placements, strides
from conformance.spec.parameters import ops

chapter = Chapter("collectives")


EACH = ops(*COLLECTIVES)
STRIDED = [op for op in EACH if op.values != ("all_to_all_single",)]


@chapter.must(
    "order/large",
    "Every collective takes tensors of some MiB, in blocks of a MiB and more, of a size that "
    "nothing divides.",
    source="derived",
    rests_on="all_reduce/sum",
)
@pytest.mark.parametrize("op", EACH)
@world_sizes(2, 3)
def test_large_tensors(ranks: Ranks, op: str) -> None:
    """A prime number of elements: of 1 MiB in each block, and of 2 where there is one block."""
    call = Call(op, (524_309,) if op in ("all_reduce", "reduce", "broadcast") else (262_147,))
    assert_taken(call, ranks.run(perform, call))


UNEVEN = [
    pytest.param("all_to_all", marks=covers("all_to_all/uneven")),
    pytest.param("all_to_all_single", marks=covers("all_to_all_single/uneven", "order/large")),
]


@pytest.mark.parametrize("op", UNEVEN)
@world_sizes(2, 3)
def test_large_uneven_exchanges(ranks: Ranks, op: str) -> None:
    """What goes from one rank to another is 3 to 4 MiB, and another size for each pair."""
    n = ranks.world_size
    sizes = [[800_011 + 25_013 * (n * to + source) for to in range(n)] for source in range(n)]
    call = Call(op, (0,), splits=tuple(map(tuple, sizes)))
    assert_taken(call, ranks.run(perform, call))


def of_64_mib(me: Me, op: str) -> list[int]:
    """Where the result of a collective of int32 differs from what it must be, if it does.

    Elements tell their index and their rank, so each one stands for itself alone.
    """
    n = me.world_size
    elements = (1 << 24) + n
    index = torch.arange(elements, dtype=torch.int32, device=me.device)
    mine = index * n + me.rank
    match op:
        case "all_reduce":
            dist.all_reduce(mine)
            got, want = mine, index * (n * n) + n * (n - 1) // 2
        case "broadcast":
            dist.broadcast(mine, n - 1)
            got, want = mine, index * n + (n - 1)
        case "all_gather_into_tensor":
            got = torch.zeros(n * elements, dtype=torch.int32, device=me.device)
            all_gather_into_tensor(got, mine)
            want = torch.cat([index * n + rank for rank in range(n)])
        case _:
            got = torch.zeros(elements // n, dtype=torch.int32, device=me.device)
            reduce_scatter_tensor(got, mine)
            want = (index * (n * n) + n * (n - 1) // 2).view(n, -1)[me.rank]
    return (got != want).nonzero().flatten()[:1].tolist()


@chapter.must(
    "order/larger-than-buffers",
    "Collectives of tensors of 64 MiB and more, larger than any buffer or segment, are right "
    "from the first element to the last.",
    source="derived: the flat gradients of a large model",
    rests_on="order/large",
)
@needs("dtype:int32")
@pytest.mark.parametrize(
    "op",
    ["all_reduce", *ops("broadcast", "all_gather_into_tensor", "reduce_scatter_tensor")],
)
@world_sizes(2)
def test_tensors_of_64_mib(ranks: Ranks, op: str) -> None:
    for rank, wrong in enumerate(ranks.run(of_64_mib, op)):
        assert_that(not wrong, f"{op}: rank {rank} is wrong from element {wrong} on", rank)


# More than 64 KiB, also of dtypes of one byte; nothing divides the last dimension.
large_shapes = st.sampled_from([(70_001,), (3, 23_371), (2, 5, 7_013)])


@chapter.must(
    "order/large-of-any-kind",
    "Collectives treat large tensors as small ones: for every dtype, every offset in memory, "
    "every reduction and every root.",
    source="derived: what is large often goes another way",
    rests_on="order/large",
)
@pytest.mark.parametrize("op", EACH)
@world_sizes(2, 3)
@given(data=st.data())
@settings(max_examples=8)
def test_any_large_call(ranks: Ranks, op: str, data: st.DataObject) -> None:
    check(ranks, op, data, offsets)


@chapter.must(
    "order/large-strided",
    "Every element of a large strided view is read and written.",
    source="derived: a view that is copied piece by piece",
    rests_on=("all_reduce/strided", "order/large"),
)
@pytest.mark.parametrize("op", STRIDED)
@world_sizes(2)
@given(data=st.data())
@settings(max_examples=8)
def test_large_views(ranks: Ranks, op: str, data: st.DataObject) -> None:
    check(ranks, op, data, strides)


def check(ranks: Ranks, op: str, data: st.DataObject, layouts: st.SearchStrategy[Layout]) -> None:
    call, placed = drawn(ranks, op, data, layouts)
    assert_taken(call, ranks.run_each(taken_by, [(call, placement) for placement in placed]))


def drawn(
    ranks: Ranks, op: str, data: st.DataObject, layouts: st.SearchStrategy[Layout]
) -> tuple[Call, list[Placement]]:
    """A call of large tensors, and where they lie on each rank."""
    n = ranks.world_size
    small = data.draw(calls(op, ranks.target, n), label="call, but for its shape")
    shape = data.draw(large_shapes, label="shape")
    # splits are a number of rows, which take the place of the first dimension
    splits = tuple(tuple(rows * shape[0] for rows in row) for row in small.splits)
    call = replace(small, shape=shape, splits=splits)
    placed = st.lists(placements(layouts), min_size=n, max_size=n)
    return call, data.draw(placed, label="placements")


@chapter.must(
    "order/large-changes-nothing-else",
    "A collective of large tensors changes nothing but its outputs: neither what it only reads, "
    "nor the memory around anything.",
    source="derived: what is large is often reduced or sorted in place",
    rests_on="order/large",
)
@pytest.mark.parametrize("op", EACH)
@world_sizes(2, 3)
@given(data=st.data())
@settings(max_examples=4)
def test_any_large_call_changes_nothing_else(ranks: Ranks, op: str, data: st.DataObject) -> None:
    call, placed = drawn(ranks, op, data, offsets)
    for rank, changed in enumerate(ranks.run_each(what_else_changed, [(call, p) for p in placed])):
        assert_that(not changed, f"{call}: rank {rank} changed {changed}", rank)


def taken_by(me: Me, call: Call, placement: Placement) -> Seen:
    """Without what was only read, and the memory around, of which there is much."""
    return Seen((), perform(me, call, placement).taken)


def in_a_group(me: Me, members: list[int], call: Call) -> Seen | None:
    group = dist.new_group(members)
    if me.rank not in members:
        return None
    return Seen((), perform(me, call, group=group).taken)


@chapter.must(
    "order/large-in-groups",
    "Every collective also takes large tensors in a group of some of the ranks.",
    source="derived",
    rests_on=("all_reduce/subgroup", "order/large"),
)
@pytest.mark.parametrize("op", EACH)
@world_sizes(4)
def test_large_tensors_in_a_group(ranks: Ranks, op: str) -> None:
    members = [1, 2, 3]
    call = Call(op, (70_001,), root=2 if op in ROOTED else 0)
    got = ranks.run(in_a_group, members, call)
    assert_taken(call, [got[rank] for rank in members], ranks=members)


def all_at_once(me: Me, planned: list[Call]) -> list[Seen]:
    """They are waited for from the last to the first."""
    pending = []
    for call in planned:
        buffers = before(call, me.rank, me.world_size)
        given = [x.to(me.device) for x in buffers.given]
        taken = [x.to(me.device) for x in buffers.taken]
        pending.append((issue(call, given, taken, async_op=True), taken))
    for work, _ in reversed(pending):
        work.wait()
    return [seen_of([], taken) for _, taken in pending]


@chapter.must(
    "order/large-at-once",
    "Several collectives of large tensors, of the same and of different sizes, may be in "
    "progress at once.",
    source="derived: the buckets of a backward pass",
    rests_on=("order/issued", "order/large"),
)
@pytest.mark.parametrize("op", EACH)
@world_sizes(2, 3)
def test_large_tensors_at_once(ranks: Ranks, op: str) -> None:
    """One of the same size follows, then a larger, a small and a smaller one."""
    n = ranks.world_size
    numels = [100_003, 100_003, 262_147, 5, 70_001]
    roots = range(len(numels)) if op in ROOTED else [0] * len(numels)
    planned = [
        Call(op, (numel,), root=root % n, salt=salt)
        for salt, (numel, root) in enumerate(zip(numels, roots, strict=True))
    ]
    got = ranks.run(all_at_once, planned)
    for index, call in enumerate(planned):
        assert_taken(call, [seen[index] for seen in got])
