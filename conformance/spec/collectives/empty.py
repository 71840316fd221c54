"""Tensors without elements, groups of one rank, and large tensors."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from conformance import Chapter, Me, Ranks, assert_that, needs, world_sizes
from conformance.oracle.collectives import COLLECTIVES, Call
from conformance.spec.collectives.perform import (
    all_gather_into_tensor,
    assert_taken,
    perform,
    reduce_scatter_tensor,
)
from conformance.spec.parameters import by_operation, ops

chapter = Chapter("collectives", source="observed, torch 2.13.0 gloo")


OPS = by_operation(
    chapter.must(
        "all_reduce/empty",
        "all_reduce of tensors without elements returns.",
        source="gloo#179, gloo#309",
        needs=("op:all_reduce", "reduce_op:sum"),
        rests_on="all_reduce/sum",
    ),
    chapter.must(
        "reduce/empty",
        "reduce of tensors without elements returns.",
        source="gloo#179, gloo#309",
        needs=("op:reduce", "reduce_op:sum"),
        rests_on="reduce/sum",
    ),
    chapter.must(
        "broadcast/empty",
        "broadcast of tensors without elements returns.",
        needs="op:broadcast",
        rests_on="broadcast/values",
    ),
    chapter.must(
        "all_gather/empty",
        "all_gather of tensors without elements returns.",
        source="pytorch#85234, gloo#356",
        needs="op:all_gather",
        rests_on="all_gather/values",
    ),
    chapter.must(
        "all_gather_into_tensor/empty",
        "all_gather_into_tensor of tensors without elements returns.",
        needs="op:all_gather_into_tensor",
        rests_on="all_gather_into_tensor/concatenated",
    ),
    chapter.must(
        "gather/empty",
        "gather of tensors without elements returns.",
        needs="op:gather",
        rests_on="gather/values",
    ),
    chapter.must(
        "scatter/empty",
        "scatter of tensors without elements returns.",
        needs="op:scatter",
        rests_on="scatter/values",
    ),
    chapter.must(
        "reduce_scatter/empty",
        "reduce_scatter of tensors without elements returns.",
        needs=("op:reduce_scatter", "reduce_op:sum"),
        rests_on="reduce_scatter/sum",
    ),
    chapter.must(
        "reduce_scatter_tensor/empty",
        "reduce_scatter_tensor of tensors without elements returns.",
        needs=("op:reduce_scatter_tensor", "reduce_op:sum"),
        rests_on="reduce_scatter_tensor/concatenated",
    ),
    chapter.must(
        "all_to_all/empty",
        "all_to_all of tensors without elements returns.",
        needs="op:all_to_all",
        rests_on="all_to_all/values",
    ),
    chapter.must(
        "all_to_all_single/empty",
        "all_to_all_single of tensors without elements returns.",
        needs="op:all_to_all_single",
        rests_on="all_to_all_single/even",
    ),
)


@pytest.mark.parametrize("op", OPS)
@world_sizes(1, 4)
def test_no_elements(ranks: Ranks, op: str) -> None:
    for shape in [(0,), (1, 0, 2), (3, 0)]:
        call = Call(op, shape)
        assert_taken(call, ranks.run(perform, call))


EACH = ops(*COLLECTIVES)


@chapter.must(
    "order/world-of-one",
    "Every collective works in a group of one rank.",
    source="gloo#154, gloo#209",
)
@pytest.mark.parametrize("op", EACH)
@world_sizes(1)
def test_a_world_of_one(ranks: Ranks, op: str) -> None:
    call = Call(op, (5, 3))
    assert_taken(call, ranks.run(perform, call))


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
