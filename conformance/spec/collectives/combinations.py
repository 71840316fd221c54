"""Collectives with random combinations of options, sizes near powers of two, and more ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from conformance import Chapter, Me, Ranks, adapts, assert_that, world_sizes
from conformance.oracle.collectives import COLLECTIVES, Call, after, before, receives
from conformance.oracle.layout import Layout, place
from conformance.spec.collectives.perform import (
    Placement,
    Seen,
    assert_all_of,
    issue,
    seen_around,
    views_of,
)
from conformance.spec.collectives.strategies import (
    REDUCING,
    ROOTED,
    calls,
    inside,
    members,
    offsets,
    placements,
    strides,
)
from conformance.spec.parameters import ops
from conformance.spec.waiting import within_patience
from conformance.target import Target

chapter = Chapter("collectives", source="derived")


EACH = ops(*COLLECTIVES)
STRIDED = [op for op in EACH if op.values != ("all_to_all_single",)]
SCATTERING = ("reduce_scatter", "reduce_scatter_tensor")
DIMENSIONS = st.sampled_from([(), (2, 1), (1, 2, 1)])  # beside those that are drawn
OTHERS_ISSUE_WITHIN_S = 10.0  # the members after this one have yet to issue the call


@dataclass(frozen=True, slots=True)
class Situation:
    """A call, by which ranks, how often in a row, and whether it is waited for separately.

    in_turns: each member issues it after the one before, or every other time after the one behind,
        and polls is_completed instead of waiting.
    """

    call: Call
    members: tuple[int, ...]
    async_op: bool
    times: int
    in_turns: bool = False


def in_a_situation(me: Me, now: Situation, placement: Placement) -> Seen | None:
    """What the last of the calls leaves on this rank; each begins with fresh values."""
    group = dist.new_group(list(now.members))
    if me.rank not in now.members:
        return None
    seen = None
    for salt in range(now.times):
        seen = one_call(me, now, salt, placement, group)
    return seen


def one_call(
    me: Me, now: Situation, salt: int, placement: Placement, group: dist.ProcessGroup
) -> Seen:
    rank, call = dist.get_rank(group), replace(now.call, salt=salt)
    buffers = before(call, rank, dist.get_world_size(group))
    given = [place(x, placement.given, me.device) for x in buffers.given]
    taken = [place(x, placement.taken, me.device) for x in buffers.taken]
    turn = rank if salt % 2 == 0 else dist.get_world_size(group) - 1 - rank
    if now.in_turns and turn:
        me.store.wait([f"call {salt}, turn {turn - 1}"])
    is_async = now.async_op or now.in_turns
    work = issue(call, views_of(given), views_of(taken), group, async_op=is_async)
    if now.in_turns:
        me.store.set(f"call {salt}, turn {turn}", "")
        assert within_patience(work.is_completed, OTHERS_ISSUE_WITHIN_S), "is_completed stays False"
    elif is_async:
        work.wait()
    return seen_around(given, taken)


@st.composite
def situations(
    draw: st.DrawFn, ranks: Ranks, op: str, more_dimensions: st.SearchStrategy[tuple[int, ...]]
) -> Situation:
    group = draw(members(ranks.world_size))
    call = draw(calls(op, ranks.target, len(group)))
    shape = (*call.shape, *draw(more_dimensions))
    times = draw(st.sampled_from([1, 12]))
    return Situation(replace(call, shape=shape), group, draw(st.booleans()), times)


def check(
    ranks: Ranks,
    op: str,
    data: st.DataObject,
    layouts: st.SearchStrategy[Layout],
    more_dimensions: st.SearchStrategy[tuple[int, ...]] = DIMENSIONS,
    *,
    in_turns: bool = False,
    around: bool = False,
) -> None:
    """in_turns: as of `Situation`. around: compare what must not change instead of the result."""
    n = ranks.world_size
    drawn = data.draw(situations(ranks, op, more_dimensions), label="situation")
    now = replace(drawn, in_turns=in_turns)
    kinds = data.draw(st.lists(placements(layouts), min_size=n, max_size=n), label="placements")
    got = ranks.run_each(in_a_situation, [(now, placement) for placement in kinds])
    seen = [got[rank] for rank in now.members]
    last = replace(now.call, salt=now.times - 1)
    of_members = [kinds[rank] for rank in now.members]
    assert_all_of(last, seen, of_members, around=around, ranks=now.members)


@chapter.must(
    "order/any-situation",
    "A collective gives the same result whatever its shape, dtype, reduction and root, the offset "
    "of its tensors, the members of the group, the number of calls before, and whether it is "
    "waited for by its handle.",
    rests_on=("all_reduce/shapes", "all_reduce/subgroup", "all_reduce/async"),
)
@pytest.mark.parametrize("op", EACH)
@world_sizes(4)
@given(data=st.data())
@settings(max_examples=10)
def test_any_call_in_any_situation(ranks: Ranks, op: str, data: st.DataObject) -> None:
    check(ranks, op, data, offsets)


@chapter.must(
    "order/any-situation-in-turns",
    "In any such situation, asynchronous calls return before other ranks have joined in, and the "
    "result is there when the handle says that it is completed.",
    source="derived; torch 2.13 docs, Work.is_completed",
    needs="feature:nonblocking",
    rests_on=("order/any-situation", "work/completed-is-written"),
)
@pytest.mark.parametrize("op", [op for op in EACH if op.values[0] not in SCATTERING])
@world_sizes(4)
@given(data=st.data())
@settings(max_examples=8)
def test_any_call_by_one_rank_after_the_other(ranks: Ranks, op: str, data: st.DataObject) -> None:
    check(ranks, op, data, offsets, in_turns=True)


@chapter.must(
    "order/any-situation-in-turns-scattered",
    "The same holds of reduce_scatter and reduce_scatter_tensor.",
    source="derived; torch 2.13 docs, Work.is_completed",
    needs="feature:nonblocking",
    rests_on=("order/any-situation", "reduce_scatter/completed-is-written"),
)
@pytest.mark.parametrize("op", ops(*SCATTERING))
@world_sizes(4)
@given(data=st.data())
@settings(max_examples=8)
def test_any_reduce_scatter_in_turns(ranks: Ranks, op: str, data: st.DataObject) -> None:
    check(ranks, op, data, offsets, in_turns=True)


@chapter.must(
    "order/any-situation-nothing-else",
    "In any such situation, a collective changes nothing but its outputs: neither what it reads, "
    "nor the memory around any of its tensors.",
    rests_on="order/any-situation",
)
@pytest.mark.parametrize("op", EACH)
@world_sizes(4)
@given(data=st.data())
@settings(max_examples=8)
def test_any_call_changes_nothing_else(ranks: Ranks, op: str, data: st.DataObject) -> None:
    check(ranks, op, data, inside, around=True)


@chapter.must(
    "order/any-situation-strided",
    "Strided views are read and written by every collective in groups of some ranks, and by "
    "asynchronous ones, as by others.",
    rests_on=("order/any-situation", "all_reduce/strided"),
)
@pytest.mark.parametrize("op", STRIDED)
@world_sizes(3)
@given(data=st.data())
@settings(max_examples=6)
def test_strided_views_in_any_situation(ranks: Ranks, op: str, data: st.DataObject) -> None:
    check(ranks, op, data, strides, st.just(()))


def wrong_calls(me: Me, made: Sequence[Call]) -> list[str]:
    """The calls whose result is wrong on this rank, each with the first tensor that is."""
    return [words for call in made if (words := what_is_wrong(me, call))]


def what_is_wrong(me: Me, call: Call) -> str:
    buffers = before(call, me.rank, me.world_size)
    given = [x.to(me.device) for x in buffers.given]
    taken = [x.to(me.device) for x in buffers.taken]
    issue(call, given, taken)
    return difference(me, call, taken)


def difference(me: Me, call: Call, taken: Sequence[Tensor]) -> str:
    """What is wrong with the result of a call, "" for nothing; found where there is much of it."""
    wanted = after(call, me.rank, me.world_size).taken if receives(call, me.rank) else ()
    for index, (got, want) in enumerate(zip(taken, wanted, strict=False)):
        differs = (got.cpu() != want).flatten().nonzero().flatten().tolist()
        if differs:
            return f"{call}: [{index}] is wrong in {len(differs)} elements from {differs[0]} on"
    return ""


def check_all(ranks: Ranks, made: Sequence[Call]) -> None:
    assert_none_wrong(ranks.run(wrong_calls, made))


def assert_none_wrong(found: Sequence[Sequence[str]]) -> None:
    """No rank has found a call whose result is wrong."""
    for rank, wrong in enumerate(found):
        assert_that(not wrong, "; ".join(wrong[:3]), rank)


def around_powers_of_two(world_size: int) -> list[int]:
    powers = [1 << k for k in (8, 10, 14, 16)]
    few = [1, world_size - 1, world_size, world_size + 1]
    return few + [power + more for power in powers for more in (-1, 0, 1)]


@chapter.must(
    "order/sizes",
    "Every collective takes tensors of any number of elements: one, as many as ranks, and the "
    "powers of two, at which buffers and pieces end, with one more or less.",
    source="derived: capacities, chunks and their last element",
    rests_on="all_reduce/sum",
)
@pytest.mark.parametrize("op", EACH)
@world_sizes(2, 3)
def test_sizes_around_powers_of_two(ranks: Ranks, op: str) -> None:
    n = ranks.world_size
    made = [Call(op, (numel,), salt=numel) for numel in around_powers_of_two(n)]
    if op == "all_to_all_single":  # of one element in all: each rank's goes to the one before it
        one_each = tuple(tuple(int((d + 1) % n == s) for d in range(n)) for s in range(n))
        made.append(Call(op, (1,), splits=one_each))
    check_all(ranks, made)


@chapter.must(
    "order/world-sizes",
    "Every collective gives the right result in groups of six and of eight ranks, from every root.",
    source="derived: trees and rings depend on the number of ranks",
    rests_on="all_reduce/sum",
)
@pytest.mark.parametrize("op", EACH)
@world_sizes(6, 8)
def test_more_ranks(ranks: Ranks, op: str) -> None:
    n = ranks.world_size
    roots = range(n) if op in ROOTED else [0]
    numels = [1, n, n + 1]
    check_all(ranks, [Call(op, (numel,), root=root) for numel in numels for root in roots])


def with_other_options(op: str, target: Target, n: int) -> list[Call]:
    """Calls of which each has tensors as large as the one before, and differs in one option."""
    if op == "all_to_all_single":
        forwards, backwards = (
            [[(d + k * s) % n for d in range(n)] for s in range(n)] for k in (1, -1)
        )
        tables = [forwards, backwards, [[n // 2] * n] * n, forwards]
        return [Call(op, (1, 2), splits=tuple(map(tuple, table))) for table in tables]
    made = [Call(op, (5,), root=root) for root in (*range(n), 0) if op in ROOTED]
    if op in REDUCING:
        claims = target.capabilities
        kinds = [(r, d) for d in ("float32", "int32") for r in ("sum", "max", "min")]
        made += [
            Call(op, (5,), dtype, reduce_op)
            for reduce_op, dtype in (*kinds, *kinds[:1])
            if claims.has(f"reduce_op:{reduce_op}") and claims.has(f"dtype:{dtype}")
        ]
    return [replace(call, salt=number) for number, call in enumerate(made)]


@chapter.must(
    "order/own-options",
    "A collective goes by the reduction, dtype, root and split sizes that it was given, whatever "
    "an earlier one with tensors of the same sizes was given.",
    source="derived: plans that are kept from call to call",
    rests_on="order/sizes",
)
@adapts()
@pytest.mark.parametrize("op", ops(*dict.fromkeys((*REDUCING, *ROOTED, "all_to_all_single"))))
@world_sizes(3, 5)
def test_calls_that_differ_in_an_option(ranks: Ranks, op: str) -> None:
    check_all(ranks, with_other_options(op, ranks.target, ranks.world_size))
