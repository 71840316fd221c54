"""Operations in a coalescing manager: results, handles and errors."""

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
    not_probed,
    world_sizes,
)
from conformance.oracle.data import sample
from conformance.oracle.reduction import reduced
from conformance.spec.collectives.lists_of_tensors import (
    MANY,
    SHAPES,
    each_reduced,
    refused,
    tensors,
)
from conformance.spec.collectives.perform import (
    REDUCE_OPS,
    all_gather_into_tensor,
    reduce_scatter_tensor,
)

chapter = Chapter("collectives", needs="feature:coalescing")


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
