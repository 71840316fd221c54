"""all_reduce_coalesced and all_gather_coalesced: results, futures and errors."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from conformance import (
    Chapter,
    Me,
    Ranks,
    assert_each_rank,
    assert_same_on_all_ranks,
    assert_that,
    covers,
    needs,
    not_probed,
    world_sizes,
)
from conformance.oracle.layout import Layout, place
from conformance.spec.collectives.lists_of_tensors import (
    MANY,
    SHAPES,
    each_reduced,
    refused,
    tensors,
)
from conformance.spec.collectives.perform import REDUCE_OPS

chapter = Chapter("collectives", needs="feature:coalescing")

WITH_EMPTY: list[tuple[int, ...]] = [(0,), (3,), (2, 0), (1,)]


def reduced_together(
    me: Me, shapes: list[tuple[int, ...]], op: str = "sum", dtype: str = "float32"
) -> list[Tensor]:
    xs = [x.to(me.device) for x in tensors(me.rank, shapes, dtype)]
    dist.all_reduce_coalesced(xs, REDUCE_OPS[op])
    return xs


@chapter.must(
    "all_reduce_coalesced/values",
    "all_reduce_coalesced reduces every tensor of the list, each with its own shape.",
    source="torch 2.13 docs, all_reduce_coalesced; gloo#152",
    rests_on="all_reduce/sum",
)
@world_sizes(1, 2, 3)
def test_each_tensor_is_reduced(ranks: Ranks) -> None:
    got = ranks.run(reduced_together, SHAPES)
    assert_same_on_all_ranks(got, want=each_reduced(ranks.world_size, SHAPES))


@covers("all_reduce_coalesced/values")
@world_sizes(2)
def test_complex_tensors_together(ranks: Ranks) -> None:
    got = ranks.run(reduced_together, [(3,), (2, 2)], "sum", "complex64")
    assert_same_on_all_ranks(got, want=each_reduced(2, [(3,), (2, 2)], "sum", "complex64"))


@chapter.must(
    "all_reduce_coalesced/many",
    "all_reduce_coalesced reduces every tensor of a list of dozens.",
    source="derived: the parameters of a model",
    rests_on="all_reduce_coalesced/values",
)
@world_sizes(2, 3)
def test_forty_tensors_are_reduced(ranks: Ranks) -> None:
    got = ranks.run(reduced_together, MANY)
    assert_same_on_all_ranks(got, want=each_reduced(ranks.world_size, MANY))


@chapter.must(
    "all_reduce_coalesced/reduce-ops",
    "all_reduce_coalesced reduces with the operation that is passed to it.",
    source="torch 2.13 docs, all_reduce_coalesced",
    rests_on="all_reduce_coalesced/values",
)
@world_sizes(2, 3)
@pytest.mark.parametrize(
    "op", ["product", "min", "max", pytest.param("avg", marks=needs("reduce_op:avg"))]
)
def test_reduced_together_by_another_operation(ranks: Ranks, op: str) -> None:
    got = ranks.run(reduced_together, SHAPES, op)
    want = each_reduced(ranks.world_size, SHAPES, op)
    assert_same_on_all_ranks(got, want=want, within_ulps=ranks.world_size if op == "avg" else 0)


@chapter.must(
    "all_reduce_coalesced/empty-members",
    "all_reduce_coalesced takes lists in which some tensors have no elements.",
    source="torch 2.13 docs, all_gather_coalesced: 'At least one tensor has to be non empty'",
    rests_on="all_reduce_coalesced/values",
)
@world_sizes(1, 3)
@pytest.mark.parametrize("shapes", [WITH_EMPTY, [(0,), (2, 0)]], ids=["some", "all"])
def test_empty_tensors_among_others(ranks: Ranks, shapes: list[tuple[int, ...]]) -> None:
    got = ranks.run(reduced_together, shapes)
    assert_same_on_all_ranks(got, want=each_reduced(ranks.world_size, shapes))


LAYOUTS = [Layout(2, 1, step=2), Layout(order=(1, 0)), Layout(3, 1), Layout(step=3)]


def reduced_in_place(me: Me) -> list[Tensor]:
    """All the memory in which strided tensors of one call lie, after it."""
    placed = [
        place(x, layout, me.device)
        for x, layout in zip(tensors(me.rank, SHAPES), LAYOUTS, strict=True)
    ]
    dist.all_reduce_coalesced([p.view for p in placed])
    return [p.memory for p in placed]


@chapter.must(
    "all_reduce_coalesced/strided",
    "all_reduce_coalesced reduces the elements of strided views and does not change the memory "
    "around and between them.",
    source="torch 2.13 docs, all_reduce_coalesced",
    rests_on="all_reduce_coalesced/values",
)
@world_sizes(2, 3)
def test_strided_tensors_together(ranks: Ranks) -> None:
    results = each_reduced(ranks.world_size, SHAPES)
    want = [place(x, layout).memory for x, layout in zip(results, LAYOUTS, strict=True)]
    assert_same_on_all_ranks(ranks.run(reduced_in_place), want=want)


def reduced_in_future(me: Me) -> tuple[list[Tensor], list[Tensor]]:
    """What the future holds, and what the tensors do."""
    xs = [x.to(me.device) for x in tensors(me.rank, SHAPES)]
    future = dist.all_reduce_coalesced(xs, async_op=True)
    return list(future.wait()), xs


@chapter.must(
    "all_reduce_coalesced/future",
    "all_reduce_coalesced with async_op returns a future of the list of tensors.",
    source="torch 2.13, all_reduce_coalesced",
    rests_on="all_reduce_coalesced/values",
)
@world_sizes(2, 3)
def test_a_future_of_the_tensors(ranks: Ranks) -> None:
    want = each_reduced(ranks.world_size, SHAPES)
    assert_same_on_all_ranks(ranks.run(reduced_in_future), want=(want, want))


def mixed_dtypes(me: Me) -> tuple[str, Tensor]:
    """An integer and 1.5 in one call, which loses something if it goes through one dtype."""
    whole, half = torch.tensor([7], device=me.device), torch.tensor([1.5], device=me.device)
    return refused(dist.all_reduce_coalesced, [whole, half]), half


@not_probed()
@chapter.must(
    "all_reduce_coalesced/mixed-dtypes-refused",
    "all_reduce_coalesced refuses tensors of several dtypes with a ValueError; none of them is "
    "converted.",
    source="pytorch#1179, pytorch#35671",
    rests_on="all_reduce_coalesced/values",
)
@world_sizes(2)
def test_several_dtypes_together(ranks: Ranks) -> None:
    assert_each_rank(ranks.run(mixed_dtypes), [("ValueError", torch.tensor([1.5]))] * 2)


def greatest_complex(me: Me) -> str:
    x = torch.ones(2, dtype=torch.complex64, device=me.device)
    return refused(dist.all_reduce_coalesced, [x], dist.ReduceOp.MAX)


@not_probed()
@chapter.must(
    "all_reduce_coalesced/complex-order-refused",
    "all_reduce_coalesced refuses MAX of complex tensors with a ValueError.",
    source="torch 2.13, all_reduce_coalesced",
    rests_on="all_reduce_coalesced/values",
)
@world_sizes(2)
def test_the_greatest_of_complex_tensors_together(ranks: Ranks) -> None:
    assert_each_rank(ranks.run(greatest_complex), ["ValueError"] * 2)


def gathered_together(me: Me, shapes: list[tuple[int, ...]], in_future: bool) -> list[list[Tensor]]:
    xs = [x.to(me.device) for x in tensors(me.rank, shapes)]
    lists = [[torch.full_like(x, -1.0) for x in xs] for _ in range(me.world_size)]
    if in_future:
        dist.all_gather_coalesced(lists, xs, async_op=True).wait()
    else:
        dist.all_gather_coalesced(lists, xs)
    return lists


@chapter.must(
    "all_gather_coalesced/values",
    "all_gather_coalesced puts rank i's list of tensors into the i-th list of lists.",
    source="torch 2.13 docs, all_gather_coalesced",
    rests_on="all_gather/values",
)
@world_sizes(1, 2, 3)
def test_lists_are_gathered(ranks: Ranks) -> None:
    n = ranks.world_size
    got = ranks.run(gathered_together, SHAPES, False)
    assert_same_on_all_ranks(got, want=[tensors(rank, SHAPES) for rank in range(n)])


@covers("all_gather_coalesced/values")
@world_sizes(2, 3)
def test_lists_of_forty_tensors_are_gathered(ranks: Ranks) -> None:
    n = ranks.world_size
    got = ranks.run(gathered_together, MANY, False)
    assert_same_on_all_ranks(got, want=[tensors(rank, MANY) for rank in range(n)])


@chapter.must(
    "all_gather_coalesced/empty-members",
    "all_gather_coalesced takes lists in which some tensors have no elements.",
    source="torch 2.13 docs, all_gather_coalesced: 'At least one tensor has to be non empty'",
    rests_on="all_gather_coalesced/values",
)
@world_sizes(1, 3)
def test_lists_with_empty_tensors_are_gathered(ranks: Ranks) -> None:
    n = ranks.world_size
    got = ranks.run(gathered_together, WITH_EMPTY, False)
    assert_same_on_all_ranks(got, want=[tensors(rank, WITH_EMPTY) for rank in range(n)])


@chapter.must(
    "all_gather_coalesced/future",
    "all_gather_coalesced with async_op returns a future that is done when the lists are filled.",
    source="torch 2.13, all_gather_coalesced",
    rests_on="all_gather_coalesced/values",
)
@world_sizes(2, 3)
def test_lists_are_gathered_when_the_future_is_done(ranks: Ranks) -> None:
    n = ranks.world_size
    got = ranks.run(gathered_together, SHAPES, True)
    assert_same_on_all_ranks(got, want=[tensors(rank, SHAPES) for rank in range(n)])


def wrong_lists(me: Me) -> dict[str, str]:
    """What came of each, as `refused` says it."""
    x = torch.ones(4, device=me.device)
    n = me.world_size

    def output(numel: int = 4) -> Tensor:
        return torch.zeros(numel, device=me.device)

    wrong = {
        "a list for each rank and one more": [[output()] for _ in range(n + 1)],
        "two outputs of one input": [[output(), output()] for _ in range(n)],
        "outputs of 5 elements for inputs of 4": [[output(5)] for _ in range(n)],
    }
    return {what: refused(dist.all_gather_coalesced, lists, [x]) for what, lists in wrong.items()}


@chapter.must(
    "all_gather_coalesced/arguments",
    "all_gather_coalesced refuses lists of the wrong length or size on every rank.",
    source="observed, torch 2.13.0 gloo",
    rests_on="all_gather_coalesced/values",
)
@not_probed()
@world_sizes(2)
def test_wrong_lists_are_refused(ranks: Ranks) -> None:
    for rank, found in enumerate(ranks.run(wrong_lists)):
        for what, came in found.items():
            assert_that(came.endswith("Error"), f"{what}: should be refused, and it {came}", rank)
