"""all_reduce_coalesced, all_gather_coalesced and the coalescing manager: results and errors."""

from __future__ import annotations

from typing import Any

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
from conformance.oracle.data import sample
from conformance.oracle.layout import Layout, place
from conformance.oracle.reduction import reduced
from conformance.spec.collectives.perform import (
    REDUCE_OPS,
    all_gather_into_tensor,
    reduce_scatter_tensor,
)

chapter = Chapter("collectives", needs="feature:coalescing")


SHAPES: list[tuple[int, ...]] = [(3,), (2, 2), (), (5, 1)]
WITH_EMPTY: list[tuple[int, ...]] = [(0,), (3,), (2, 0), (1,)]


def tensors(rank: int, shapes: list[tuple[int, ...]], dtype: str = "float32") -> list[Tensor]:
    """One tensor for each shape, all different."""
    return [sample(shape, dtype, rank, salt) for salt, shape in enumerate(shapes)]


def each_reduced(
    world_size: int, shapes: list[tuple[int, ...]], op: str = "sum", dtype: str = "float32"
) -> list[Tensor]:
    everyone = [tensors(rank, shapes, dtype) for rank in range(world_size)]
    return [reduced(op, of_one) for of_one in zip(*everyone, strict=True)]


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


def refused(call: Any, *args: Any, **kwargs: Any) -> str:
    """The type of the error that the call raises, or what it returned."""
    try:
        returned = call(*args, **kwargs)
    except (ValueError, RuntimeError, TypeError) as error:
        return type(error).__name__
    return f"returned {returned}"


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


def wrong_lists(me: Me) -> list[bool]:
    """Whether lists of a wrong length, an inner list of a wrong length, and a tensor of a wrong
    size were refused."""
    x = torch.ones(4, device=me.device)
    n = me.world_size

    def output(numel: int = 4) -> Tensor:
        return torch.zeros(numel, device=me.device)

    wrong = [
        [[output()] for _ in range(n + 1)],
        [[output(), output()] for _ in range(n)],
        [[output(5)] for _ in range(n)],
    ]
    said = [refused(dist.all_gather_coalesced, lists, [x]) for lists in wrong]
    return [words in ("RuntimeError", "ValueError") for words in said]


@chapter.must(
    "all_gather_coalesced/arguments",
    "all_gather_coalesced refuses lists of the wrong length or size on every rank.",
    source="observed, torch 2.13.0 gloo",
    rests_on="all_gather_coalesced/values",
)
@not_probed()
@world_sizes(2)
def test_wrong_lists_are_refused(ranks: Ranks) -> None:
    assert_each_rank(ranks.run(wrong_lists), [[True] * 3] * 2)


def managed_all_reduces(me: Me, op: str, async_ops: bool) -> list[Tensor]:
    xs = [x.to(me.device) for x in tensors(me.rank, SHAPES)]
    with dist._coalescing_manager(async_ops=async_ops) as manager:
        for x in xs:
            dist.all_reduce(x, REDUCE_OPS[op], async_op=async_ops)
    if async_ops:
        manager.wait()
    return xs


@chapter.must(
    "coalescing/all_reduce",
    "all_reduce calls inside a coalescing manager are complete when it ends, with the results "
    "that separate calls would have.",
    source="torch 2.13, _coalescing_manager",
    rests_on="all_reduce_coalesced/values",
)
@world_sizes(1, 2, 3)
def test_all_reduces_in_a_manager(ranks: Ranks) -> None:
    got = ranks.run(managed_all_reduces, "sum", False)
    assert_same_on_all_ranks(got, want=each_reduced(ranks.world_size, SHAPES))


@chapter.must(
    "coalescing/reduce-op",
    "all_reduce calls inside a coalescing manager reduce with the operation that they name.",
    source="torch 2.13, _coalescing_manager",
    rests_on="coalescing/all_reduce",
)
@world_sizes(2, 3)
@pytest.mark.parametrize("op", ["min", "max", "product"])
def test_another_operation_in_a_manager(ranks: Ranks, op: str) -> None:
    got = ranks.run(managed_all_reduces, op, False)
    assert_same_on_all_ranks(got, want=each_reduced(ranks.world_size, SHAPES, op))


@chapter.must(
    "coalescing/async",
    "A coalescing manager with async_ops can be waited for, and the results are there once its "
    "wait has returned.",
    source="torch 2.13, _coalescing_manager",
    rests_on="coalescing/all_reduce",
)
@world_sizes(2, 3)
def test_a_manager_to_wait_for(ranks: Ranks) -> None:
    got = ranks.run(managed_all_reduces, "sum", True)
    assert_same_on_all_ranks(got, want=each_reduced(ranks.world_size, SHAPES))


BLOCKS = [(2,), (1, 3), (4, 2)]


def managed_gathers(me: Me) -> list[Tensor]:
    xs = [x.to(me.device) for x in tensors(me.rank, BLOCKS)]
    outputs = [torch.full_like(torch.cat([x] * me.world_size), -1.0) for x in xs]
    with dist._coalescing_manager():
        for output, x in zip(outputs, xs, strict=True):
            all_gather_into_tensor(output, x)
    return outputs


@chapter.must(
    "coalescing/all_gather_into_tensor",
    "all_gather_into_tensor calls inside a coalescing manager are complete when it ends.",
    source="torch 2.13, _coalescing_manager",
    rests_on="all_gather_into_tensor/concatenated",
)
@world_sizes(1, 2, 3)
def test_gathers_in_a_manager(ranks: Ranks) -> None:
    everyone = [tensors(rank, BLOCKS) for rank in range(ranks.world_size)]
    want = [torch.cat(of_one) for of_one in zip(*everyone, strict=True)]
    assert_same_on_all_ranks(ranks.run(managed_gathers), want=want)


def parts(rank: int, world_size: int) -> list[list[Tensor]]:
    """For each block, what the rank has for each rank."""
    return [
        [sample(shape, "float32", rank, salt=10 * i + to) for to in range(world_size)]
        for i, shape in enumerate(BLOCKS)
    ]


def managed_scatters(me: Me) -> list[Tensor]:
    mine = parts(me.rank, me.world_size)
    outputs = [torch.full_like(block[0], -1.0, device=me.device) for block in mine]
    with dist._coalescing_manager():
        for output, block in zip(outputs, mine, strict=True):
            reduce_scatter_tensor(output, torch.cat(block).to(me.device))
    return outputs


@chapter.must(
    "coalescing/reduce_scatter_tensor",
    "reduce_scatter_tensor calls inside a coalescing manager are complete when it ends.",
    source="torch 2.13, _coalescing_manager",
    rests_on="reduce_scatter_tensor/concatenated",
)
@world_sizes(1, 2, 3)
def test_scatters_in_a_manager(ranks: Ranks) -> None:
    n = ranks.world_size
    everyone = [parts(rank, n) for rank in range(n)]
    want = [
        [reduced("sum", [mine[i][to] for mine in everyone]) for i in range(len(BLOCKS))]
        for to in range(n)
    ]
    assert_each_rank(ranks.run(managed_scatters), want)


MANY: list[tuple[int, ...]] = [(1 + i % 3, 2) for i in range(40)]


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


def many_managed(me: Me, kind: str) -> list[Tensor]:
    """Forty calls of one kind in a manager."""
    xs = [x.to(me.device) for x in tensors(me.rank, MANY)]
    if kind == "all_reduce":
        with dist._coalescing_manager():
            for x in xs:
                dist.all_reduce(x)
        return xs
    wide = [torch.cat([x] * me.world_size) for x in xs]
    with dist._coalescing_manager():
        for x, all_of_it in zip(xs, wide, strict=True):
            if kind == "all_gather_into_tensor":
                all_gather_into_tensor(all_of_it, x)
            else:
                reduce_scatter_tensor(x, all_of_it)
    return wide if kind == "all_gather_into_tensor" else xs


@chapter.must(
    "coalescing/many",
    "A coalescing manager carries out dozens of calls, for each kind of operation that it takes.",
    source="derived: the parameters of a model",
    rests_on=(
        "coalescing/all_reduce",
        "coalescing/all_gather_into_tensor",
        "coalescing/reduce_scatter_tensor",
    ),
)
@world_sizes(2, 3)
@pytest.mark.parametrize("kind", ["all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"])
def test_forty_calls_in_a_manager(ranks: Ranks, kind: str) -> None:
    n = ranks.world_size
    want = each_reduced(n, MANY)
    if kind == "all_gather_into_tensor":
        everyone = [tensors(rank, MANY) for rank in range(n)]
        want = [torch.cat(of_one) for of_one in zip(*everyone, strict=True)]
    assert_same_on_all_ranks(ranks.run(many_managed, kind), want=want)


def other_operations(me: Me, managed: bool) -> list[Tensor]:
    """Two reduces and a broadcast, which are made at once in a manager too."""
    xs = [x.to(me.device) for x in tensors(me.rank, [(3,), (2, 2), (4,)])]

    def calls() -> None:
        dist.reduce(xs[0], 0)
        dist.reduce(xs[1], 0, dist.ReduceOp.MAX)
        dist.broadcast(xs[2], me.world_size - 1)

    if managed:
        with dist._coalescing_manager():
            calls()
    else:
        calls()
    return xs if me.rank == 0 else xs[2:]


@chapter.must(
    "coalescing/other-operations",
    "Operations that cannot be coalesced give the same result inside a coalescing manager as "
    "outside.",
    source="pytorch#104168",
    rests_on=("coalescing/all_reduce", "reduce/sum"),
)
@world_sizes(2, 3)
def test_other_operations_in_a_manager(ranks: Ranks) -> None:
    alone = ranks.run(other_operations, False)
    assert_each_rank(ranks.run(other_operations, True), alone)


def mixed_operations(me: Me) -> tuple[str, Tensor]:
    """The error of a manager with two kinds of operation, and an all_reduce after that."""
    words = "accepted"
    try:
        with dist._coalescing_manager():
            dist.all_reduce(torch.ones(2, device=me.device))
            reduce_scatter_tensor(
                torch.zeros(1, device=me.device), torch.ones(me.world_size, device=me.device)
            )
    except RuntimeError as error:
        words = str(error)
    x = torch.full((2,), me.rank + 1.0, device=me.device)
    dist.all_reduce(x)
    return words, x


@not_probed()
@chapter.must(
    "coalescing/mixed-refused",
    "A coalescing manager refuses operations of several kinds, and the group can be used "
    "afterwards.",
    source="torch 2.13, _coalescing_manager: 'requires all collectives to be the same type'",
    rests_on="coalescing/all_reduce",
)
@world_sizes(2)
def test_two_kinds_of_operation_in_a_manager(ranks: Ranks) -> None:
    got = ranks.run(mixed_operations)
    for rank, (words, _) in enumerate(got):
        assert_that("to be the same type" in words, f"the manager said {words!r}", rank)
    assert_each_rank([x for _, x in got], [torch.full((2,), 3.0)] * 2)


def early_wait(me: Me) -> str:
    """What comes of waiting for an operation before the manager has issued it."""
    with dist._coalescing_manager():
        work = dist.all_reduce(torch.ones(2, device=me.device), async_op=True)
        return refused(lambda: work.wait())


@not_probed()
@chapter.must(
    "coalescing/no-early-wait",
    "The handle that an operation inside a coalescing manager returns cannot be waited for: its "
    "wait raises.",
    source="torch 2.13, _IllegalWork",
    rests_on="coalescing/all_reduce",
)
@world_sizes(2)
def test_nothing_to_wait_for_inside_of_a_manager(ranks: Ranks) -> None:
    assert_each_rank(ranks.run(early_wait), ["ValueError"] * 2)


def empty_manager(me: Me) -> str:
    with dist._coalescing_manager():
        pass
    with dist._coalescing_manager(async_ops=True):
        pass
    return "left"


@not_probed()
@chapter.must(
    "coalescing/nothing",
    "A coalescing manager without operations does nothing.",
    source="torch 2.13, _coalescing_manager",
)
@world_sizes(1, 2)
def test_a_manager_without_operations(ranks: Ranks) -> None:
    assert_each_rank(ranks.run(empty_manager), ["left"] * ranks.world_size)
