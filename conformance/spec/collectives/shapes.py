"""Random calls of each collective: any shape, dtype, reduce op, root and split sizes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance import Chapter, Ranks, world_sizes
from conformance.spec.collectives.perform import assert_taken, perform
from conformance.spec.collectives.strategies import calls
from conformance.spec.parameters import by_operation

chapter = Chapter("collectives")


OPS = by_operation(
    chapter.must(
        "all_reduce/shapes",
        "all_reduce takes tensors of every shape, zero-dimensional ones included, and every dtype "
        "that the target claims.",
        source="torch 2.13 docs, all_reduce",
        needs=("op:all_reduce", "reduce_op:sum"),
        rests_on="all_reduce/sum",
    ),
    chapter.must(
        "reduce/shapes",
        "reduce takes tensors of every shape, zero-dimensional ones included, and every dtype that "
        "the target claims.",
        source="torch 2.13 docs, reduce",
        needs=("op:reduce", "reduce_op:sum"),
        rests_on="reduce/sum",
    ),
    chapter.must(
        "broadcast/shapes",
        "broadcast takes tensors of every shape, zero-dimensional ones included, and every dtype "
        "that the target claims.",
        source="torch 2.13 docs, broadcast",
        needs="op:broadcast",
        rests_on="broadcast/values",
    ),
    chapter.must(
        "all_gather/shapes",
        "all_gather takes tensors of every shape, zero-dimensional ones included, and every dtype "
        "that the target claims.",
        source="torch 2.13 docs, all_gather",
        needs="op:all_gather",
        rests_on="all_gather/values",
    ),
    chapter.must(
        "all_gather_into_tensor/shapes",
        "all_gather_into_tensor takes tensors of every shape with a first dimension, and every "
        "dtype that the target claims.",
        source="torch 2.13 docs, all_gather_single",
        needs="op:all_gather_into_tensor",
        rests_on="all_gather_into_tensor/concatenated",
    ),
    chapter.must(
        "gather/shapes",
        "gather takes tensors of every shape, zero-dimensional ones included, and every real dtype "
        "that the target claims.",
        source="torch 2.13 docs, gather",
        needs="op:gather",
        rests_on="gather/values",
    ),
    chapter.must(
        "scatter/shapes",
        "scatter takes tensors of every shape, zero-dimensional ones included, and every dtype "
        "that the target claims.",
        source="torch 2.13 docs, scatter",
        needs="op:scatter",
        rests_on="scatter/values",
    ),
    chapter.must(
        "reduce_scatter/shapes",
        "reduce_scatter takes tensors of every shape, zero-dimensional ones included, and every "
        "dtype that the target claims.",
        source="torch 2.13 docs, reduce_scatter",
        needs=("op:reduce_scatter", "reduce_op:sum"),
        rests_on="reduce_scatter/sum",
    ),
    chapter.must(
        "reduce_scatter_tensor/shapes",
        "reduce_scatter_tensor takes tensors of every shape with a first dimension, and every "
        "dtype that the target claims.",
        source="torch 2.13 docs, reduce_scatter_single",
        needs=("op:reduce_scatter_tensor", "reduce_op:sum"),
        rests_on="reduce_scatter_tensor/concatenated",
    ),
    chapter.must(
        "all_to_all/shapes",
        "all_to_all takes tensors of every shape and every dtype that the target claims.",
        source="torch 2.13 docs, all_to_all",
        needs="op:all_to_all",
        rests_on="all_to_all/values",
    ),
    chapter.must(
        "all_to_all_single/shapes",
        "all_to_all_single takes tensors of every shape with a first dimension, and every dtype "
        "that the target claims.",
        source="torch 2.13 docs, all_to_all_single",
        needs="op:all_to_all_single",
        rests_on="all_to_all_single/uneven",
    ),
)


@pytest.mark.parametrize("op", OPS)
@world_sizes(2, 3)
@given(data=st.data())
@settings(max_examples=40)
def test_any_call_gives_what_the_oracle_says(ranks: Ranks, op: str, data: st.DataObject) -> None:
    call = data.draw(calls(op, ranks.target, ranks.world_size), label="call")
    assert_taken(call, ranks.run(perform, call))
