"""Tensors without elements, groups of one rank, and tensors of some MiB."""

from __future__ import annotations

import pytest

from conformance import Ranks, covers, world_sizes
from conformance.cases.collectives.perform import assert_taken, perform
from conformance.cases.parameters import ops
from conformance.oracle.collectives import Call

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


EACH = ops(
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
)


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
    """A prime number of elements; more than 2 MiB where all of a rank's tensor is one block."""
    call = Call(op, (524_309,) if op in ("all_reduce", "reduce", "broadcast") else (150_001,))
    assert_taken(call, ranks.run(perform, call))
