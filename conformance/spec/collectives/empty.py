"""Collectives on tensors without elements."""

from __future__ import annotations

import pytest

from conformance import Chapter, Ranks, world_sizes
from conformance.oracle.collectives import Call
from conformance.spec.collectives.perform import assert_taken, perform
from conformance.spec.parameters import by_operation

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
