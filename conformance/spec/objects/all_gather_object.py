"""all_gather_object, and rules for all object collectives: pickling, copies, tensors in between."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from conformance import (
    Chapter,
    Me,
    Ranks,
    assert_each_rank,
    assert_same_on_all_ranks,
    covers,
    world_sizes,
)
from conformance.spec.objects.payloads import things_of

chapter = Chapter("objects")


def gather_everywhere(me: Me, objects: list[Any]) -> list[Any]:
    got: list[Any] = [None] * me.world_size
    dist.all_gather_object(got, objects[me.rank])
    return got


@chapter.must(
    "all_gather_object/gathers",
    "all_gather_object leaves the object of group rank i at index i of every rank's list.",
    source="torch 2.13 docs, all_gather_object",
    needs=("op:all_gather", "dtype:uint8", "dtype:int64"),
)
@world_sizes(1, 2, 3, 5, at_least=1)
def test_every_rank_has_every_object(ranks: Ranks) -> None:
    objects = [{"from": rank, "text": "x" * rank} for rank in range(ranks.world_size)]
    assert_same_on_all_ranks(ranks.run(gather_everywhere, objects), want=objects)


@chapter.must(
    "all_gather_object/differing-sizes",
    "Objects whose pickles differ in size, by a little or by a megabyte, are gathered whole.",
    source="torch 2.13 docs, all_gather_object: any picklable object",
    needs="op:all_gather",
    rests_on="all_gather_object/gathers",
)
@world_sizes(2, 3, 4, at_least=2)
@pytest.mark.parametrize("largest_on", ["first", "last"])
def test_objects_of_very_different_sizes(ranks: Ranks, largest_on: str) -> None:
    sizes = [1 << 20, *range(ranks.world_size - 1)]
    objects = [bytes([rank]) * size for rank, size in enumerate(sizes)]
    objects = objects if largest_on == "first" else objects[::-1]
    assert_same_on_all_ranks(ranks.run(gather_everywhere, objects), want=objects)


def gather_into_a_long_list(me: Me) -> list[Any]:
    got: list[Any] = ["before"] * (me.world_size + 2)
    dist.all_gather_object(got, me.rank)
    return got


def gather_into_a_short_list(me: Me) -> None:
    got: list[Any] = ["before"] * (me.world_size - 1)
    with pytest.raises(IndexError):
        dist.all_gather_object(got, me.rank)


@chapter.must(
    "all_gather_object/list-length",
    "A list with more entries than ranks keeps the rest of its entries; one with fewer raises "
    "an IndexError.",
    source="torch/distributed/distributed_c10d.py of torch 2.13, all_gather_object: 'It should be "
    "correctly sized'",
    needs="op:all_gather",
    rests_on="all_gather_object/gathers",
)
@world_sizes(1, 2, 3)
def test_lists_of_the_wrong_length(ranks: Ranks) -> None:
    got = ranks.run(gather_into_a_long_list)
    assert_same_on_all_ranks(got, want=[*range(ranks.world_size), "before", "before"])
    ranks.run(gather_into_a_short_list)


def gather_in_a_subgroup(me: Me) -> list[Any] | None:
    """Among all ranks but 0."""
    group = dist.new_group(list(range(1, me.world_size)))
    if me.rank == 0:
        return None
    got: list[Any] = ["before"] * (me.world_size - 1)
    dist.all_gather_object(got, f"rank {me.rank}", group=group)
    return got


@covers("all_gather_object/gathers")
@world_sizes(2, 3, 4, at_least=2)
def test_gathering_in_a_subgroup(ranks: Ranks) -> None:
    members = range(1, ranks.world_size)
    want = [f"rank {rank}" for rank in members]
    assert_each_rank(ranks.run(gather_in_a_subgroup), [None, *[want] * len(want)])


def gather_and_broadcast_things(me: Me) -> tuple[list[Any], list[Any]]:
    mine = things_of(me.rank)
    got: list[Any] = [None] * me.world_size
    dist.all_gather_object(got, mine)
    last = mine if me.rank == me.world_size - 1 else [0] * len(mine)
    dist.broadcast_object_list(last, me.world_size - 1)
    return got, last


@chapter.must(
    "objects/anything-picklable",
    "Every value that can be pickled arrives equal to the original: nested containers, tensors, "
    "instances of classes, None, bytes, an empty list.",
    source="torch 2.13 docs, all_gather_object: 'Pickable Python object'",
    rests_on=("all_gather_object/gathers", "broadcast_object_list/broadcasts"),
)
@world_sizes(1, 2, 3)
def test_things_of_every_kind_arrive(ranks: Ranks) -> None:
    n = ranks.world_size
    got = ranks.run(gather_and_broadcast_things)
    assert_same_on_all_ranks(got, want=([things_of(rank) for rank in range(n)], things_of(n - 1)))


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.floats(width=32),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=3), inner, max_size=4)
        | st.tuples(inner, inner)
    ),
    max_leaves=12,
)


@covers("objects/anything-picklable")
@world_sizes(2, 3)
@given(data=st.data())
@settings(max_examples=15)
def test_any_nesting_of_values_arrives(ranks: Ranks, data: st.DataObject) -> None:
    objects = [data.draw(_values) for _ in range(ranks.world_size)]
    assert_same_on_all_ranks(ranks.run(gather_everywhere, objects), want=objects)


def gather_what_cannot_be_pickled(me: Me) -> Tensor:
    """All ranks get an error; then the same group carries on."""
    got: list[Any] = [None] * me.world_size
    with pytest.raises((TypeError, AttributeError)):
        dist.all_gather_object(got, threading.Lock())
    if got != [None] * me.world_size:
        pytest.fail(f"the list was changed: {got}")
    x = torch.full((3,), float(me.rank + 1), device=me.device)
    dist.all_reduce(x)
    return x


@chapter.must(
    "objects/unpicklable",
    "Passing an object that cannot be pickled raises on the rank that passes it, before anything "
    "is sent, so that the group works as before.",
    source="observed, torch 2.13.0 gloo",
    rests_on=("all_gather_object/gathers", "all_reduce/sum"),
)
@world_sizes(1, 2, 3)
def test_what_cannot_be_pickled_raises_before_anything_is_sent(ranks: Ranks) -> None:
    n = ranks.world_size
    want = torch.full((3,), n * (n + 1) / 2)
    assert_same_on_all_ranks(ranks.run(gather_what_cannot_be_pickled), want=want)


def change_what_was_received(me: Me) -> list[Any]:
    """Gather twice, change everything of the first time; returns the second time and the own."""
    mine = [me.rank, [me.rank]]
    first: list[Any] = [None] * me.world_size
    second: list[Any] = [None] * me.world_size
    dist.all_gather_object(first, mine)
    dist.all_gather_object(second, mine)
    for thing in first:
        thing[0] = "changed"
        thing[1].append("changed")
    return [second, mine]


@chapter.must(
    "objects/received-are-copies",
    "A received object belongs to the receiver: changing it changes no other rank's object, no "
    "earlier result and no object that was passed in.",
    source="torch 2.13 docs, all_gather_object: objects are pickled",
    rests_on="all_gather_object/gathers",
)
@world_sizes(1, 2, 3)
def test_changing_what_was_received_changes_nothing_else(ranks: Ranks) -> None:
    n = ranks.world_size
    everything = [[rank, [rank]] for rank in range(n)]
    got = ranks.run(change_what_was_received)
    assert_each_rank(got, [[everything, [rank, [rank]]] for rank in range(n)])


def mix_objects_and_tensors(me: Me) -> list[Any]:
    """Reductions under way while objects are exchanged."""
    first = torch.full((4,), 1.0 + me.rank, device=me.device)
    second = torch.full((50_000,), 10.0 * me.rank, device=me.device)
    works = [dist.all_reduce(x, async_op=True) for x in (first, second)]
    gathered: list[Any] = [None] * me.world_size
    dist.all_gather_object(gathered, "x" * me.rank)
    told = [me.rank]
    dist.broadcast_object_list(told, me.world_size - 1)
    third = torch.full((2,), float(me.rank), device=me.device)
    dist.all_reduce(third)
    for work in works:
        work.wait()
    return [first, second[:2].clone(), third, gathered, told]


@chapter.must(
    "objects/between-collectives",
    "Object collectives and tensor collectives in any sequence do not disturb each other.",
    source="torch 2.13 docs, object collectives",
    rests_on=("all_gather_object/gathers", "broadcast_object_list/broadcasts", "all_reduce/sum"),
)
@world_sizes(2, 3)
def test_objects_and_tensors_in_turns(ranks: Ranks) -> None:
    n = ranks.world_size
    total = sum(range(n))
    want = [
        torch.full((4,), float(n + total)),
        torch.full((2,), 10.0 * total),
        torch.full((2,), float(total)),
        ["x" * rank for rank in range(n)],
        [n - 1],
    ]
    assert_same_on_all_ranks(ranks.run(mix_objects_and_tensors), want=want)
