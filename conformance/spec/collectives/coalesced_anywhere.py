"""Random coalesced collectives: any shapes, dtypes, offsets, groups, and ways to wait."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance import Chapter, Me, Ranks, adapts, world_sizes
from conformance.capabilities import DTYPES
from conformance.oracle.collectives import Call, before
from conformance.oracle.layout import place
from conformance.spec.collectives.coalesced_handles import GATHER, LIST, REDUCE, SCATTER, Way
from conformance.spec.collectives.combinations import (
    around_powers_of_two,
    assert_none_wrong,
    difference,
)
from conformance.spec.collectives.perform import (
    REDUCE_OPS,
    Placement,
    Seen,
    assert_all_of,
    everyone,
    issue,
    seen_around,
    views_of,
)
from conformance.spec.collectives.strategies import (
    calls,
    inside,
    members,
    offsets,
    placements,
    shapes,
    shapes_with_rows,
)

chapter = Chapter("collectives", source="derived", needs="feature:coalescing")

MOST_CALLS = 3
ANY_SHAPE = st.one_of(shapes, st.sampled_from([(), (2, 1, 2, 1)]))
ANY_WITH_ROWS = st.one_of(shapes_with_rows, st.sampled_from([(1,), (2, 1, 2, 1)]))


@dataclass(frozen=True, slots=True)
class Situation:
    """Calls that are coalesced, by which ranks, and how often in a row."""

    calls: tuple[Call, ...]
    members: tuple[int, ...]
    async_op: bool
    times: int


def coalesced(me: Me, way: Way, now: Situation, placement: Placement) -> list[Seen]:
    """What the last time leaves on this rank, of each call; each time begins with fresh values."""
    group = dist.new_group(list(now.members))
    if me.rank not in now.members:
        return []
    seen: list[Seen] = []
    for time in range(now.times):
        seen = once(me, way, replace(now, calls=at(time, now)), placement, group)
    return seen


def at(time: int, now: Situation) -> tuple[Call, ...]:
    return tuple(replace(call, salt=call.salt + time) for call in now.calls)


def once(
    me: Me, way: Way, now: Situation, placement: Placement, group: dist.ProcessGroup
) -> list[Seen]:
    buffers = [before(call, dist.get_rank(group), len(now.members)) for call in now.calls]
    given = [[place(x, placement.given, me.device) for x in b.given] for b in buffers]
    taken = [[place(x, placement.taken, me.device) for x in b.taken] for b in buffers]
    if way.in_a_manager:
        with dist._coalescing_manager(group, async_ops=now.async_op) as manager:
            for call, inputs, outputs in zip(now.calls, given, taken, strict=True):
                issue(call, views_of(inputs), views_of(outputs), group, async_op=now.async_op)
        if now.async_op:
            manager.wait()
    else:
        xs = [placed.view for [placed] in taken]
        op = REDUCE_OPS[now.calls[0].reduce_op]
        work = dist.all_reduce_coalesced(xs, op, group, async_op=now.async_op)
        if now.async_op:
            work.wait()
    return [seen_around(i, o) for i, o in zip(given, taken, strict=True)]


@st.composite
def situations(draw: st.DrawFn, ranks: Ranks, way: Way) -> Situation:
    group = draw(members(ranks.world_size))
    first = draw(calls(way.op, ranks.target, len(group)))
    if way.op == "all_gather_into_tensor":  # then no bit may be lost
        first = replace(first, noisy=draw(st.booleans()))
    of_any_shape = ANY_SHAPE if way.op == "all_reduce" else ANY_WITH_ROWS
    more = draw(st.lists(of_any_shape, max_size=MOST_CALLS))
    made = (first, *(replace(first, shape=s, salt=20 * i) for i, s in enumerate(more, 1)))
    times = draw(st.sampled_from([1, 4]))
    return Situation(made, group, draw(st.booleans()), times)


def check(ranks: Ranks, way: Way, data: st.DataObject, *, around: bool) -> None:
    """around: compare what must not change instead of the results."""
    n = ranks.world_size
    now = data.draw(situations(ranks, way), label="situation")
    kind = placements(inside if around else offsets)
    kinds = data.draw(st.lists(kind, min_size=n, max_size=n), label="placements")
    got = ranks.run_each(coalesced, [(way, now, placement) for placement in kinds])
    for index, call in enumerate(at(now.times - 1, now)):
        seen = [got[rank][index] for rank in now.members]
        of_members = [kinds[rank] for rank in now.members]
        assert_all_of(call, seen, of_members, around=around, ranks=now.members)


@chapter.must(
    "coalescing/any-situation",
    "Coalesced calls give the same results whatever their number, their shapes, dtype and "
    "reduction, the offsets of their tensors, the members of the group, the number of calls "
    "before, and whether they are waited for by a handle.",
    rests_on=("coalescing/all_reduce", "all_reduce/subgroup"),
)
@pytest.mark.parametrize("way", [REDUCE, LIST, GATHER, SCATTER])
@world_sizes(4)
@given(data=st.data())
@settings(max_examples=12)
def test_coalesced_calls_in_any_situation(ranks: Ranks, way: Way, data: st.DataObject) -> None:
    check(ranks, way, data, around=False)


@chapter.must(
    "coalescing/any-situation-nothing-else",
    "In any such situation, coalesced calls change nothing but their outputs: neither what they "
    "read, nor the memory around any of their tensors.",
    rests_on="coalescing/any-situation",
)
@pytest.mark.parametrize("way", [REDUCE, LIST, GATHER, SCATTER])
@world_sizes(4)
@given(data=st.data())
@settings(max_examples=8)
def test_coalesced_calls_change_nothing_else(ranks: Ranks, way: Way, data: st.DataObject) -> None:
    check(ranks, way, data, around=True)


def wrong_of_all(me: Me, way: Way, made: tuple[Call, ...]) -> list[str]:
    """What is wrong with these calls, coalesced, on dense tensors of all ranks."""
    now = Situation(made, tuple(range(me.world_size)), async_op=False, times=1)
    seen = once(me, way, now, Placement(), everyone())
    words = (difference(me, call, one.taken) for call, one in zip(made, seen, strict=True))
    return list(filter(None, words))


@chapter.must(
    "coalescing/sizes",
    "Coalesced calls take tensors of any number of elements together: one, as many as ranks, and "
    "the powers of two, at which buffers and pieces end, with one more or less.",
    source="derived: capacities, chunks and their last element",
    rests_on="coalescing/all_reduce",
)
@pytest.mark.parametrize("way", [REDUCE, LIST, GATHER, SCATTER])
@world_sizes(2, 3)
def test_coalesced_sizes_around_powers_of_two(ranks: Ranks, way: Way) -> None:
    """By all_reduce not only sums, but the largest, too."""
    sizes = around_powers_of_two(ranks.world_size)
    for reduce_op in ("sum", "max") if way.op == "all_reduce" else ("sum",):
        made = tuple(Call(way.op, (n,), salt=n, reduce_op=reduce_op) for n in sizes)
        assert_none_wrong(ranks.run(wrong_of_all, way, made))


@chapter.must(
    "coalescing/dtypes",
    "Coalesced calls take each dtype that the same calls take one by one.",
    source="derived; torch 2.13 docs, torch.dtype",
    rests_on=("coalescing/all_reduce", "dtypes/reduced"),
)
@adapts()
@pytest.mark.parametrize("way", [REDUCE, LIST, GATHER, SCATTER])
@world_sizes(2, 3)
def test_coalesced_calls_of_each_dtype(ranks: Ranks, way: Way) -> None:
    """What a sum of bools means has a requirement of its own."""
    claimed = [name for name in DTYPES if ranks.target.capabilities.has(f"dtype:{name}")]
    for dtype in claimed:
        if dtype != "bool" or way.op == "all_gather_into_tensor":
            made = Call(way.op, (5,), dtype), Call(way.op, (2,), dtype)
            assert_none_wrong(ranks.run(wrong_of_all, way, made))
