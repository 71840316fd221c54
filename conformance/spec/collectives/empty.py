"""Tensors without elements, groups of one rank, and large tensors."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from conformance import Me, Ranks, assert_that, covers, needs, world_sizes
from conformance.oracle.collectives import COLLECTIVES, Call
from conformance.spec.collectives.perform import (
    all_gather_into_tensor,
    assert_taken,
    perform,
    reduce_scatter_tensor,
)
from conformance.spec.parameters import ops

OPS = [
    pytest.param("all_reduce", marks=covers("all_reduce/empty")),
    pytest.param("reduce", marks=covers("reduce/empty")),
    pytest.param("broadcast", marks=covers("broadcast/empty")),
    pytest.param("all_gather", marks=covers("all_gather/empty")),
    pytest.param("all_gather_into_tensor", marks=covers("all_gather_into_tensor/empty")),
    pytest.param("gather", marks=covers("gather/empty")),
    pytest.param("scatter", marks=covers("scatter/empty")),
    pytest.param("reduce_scatter", marks=covers("reduce_scatter/empty")),
    pytest.param("reduce_scatter_tensor", marks=covers("reduce_scatter_tensor/empty")),
    pytest.param("all_to_all", marks=covers("all_to_all/empty")),
    pytest.param("all_to_all_single", marks=covers("all_to_all_single/empty")),
]


@pytest.mark.parametrize("op", OPS)
@world_sizes(1, 4)
def test_no_elements(ranks: Ranks, op: str) -> None:
    for shape in [(0,), (1, 0, 2), (3, 0)]:
        call = Call(op, shape)
        assert_taken(call, ranks.run(perform, call))


EACH = ops(*COLLECTIVES)


@covers("order/world-of-one")
@pytest.mark.parametrize("op", EACH)
@world_sizes(1)
def test_a_world_of_one(ranks: Ranks, op: str) -> None:
    call = Call(op, (5, 3))
    assert_taken(call, ranks.run(perform, call))


@covers("order/large")
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


@covers("order/larger-than-buffers")
@needs("dtype:int32")
@pytest.mark.parametrize(
    "op",
    ["all_reduce", *ops("broadcast", "all_gather_into_tensor", "reduce_scatter_tensor")],
)
@world_sizes(2)
def test_tensors_of_64_mib(ranks: Ranks, op: str) -> None:
    for rank, wrong in enumerate(ranks.run(of_64_mib, op)):
        assert_that(not wrong, f"{op}: rank {rank} is wrong from element {wrong} on", rank)
