"""Every shape, dtype, reduce operation, root and table of splits that a target claims."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance import Ranks, covers, world_sizes
from conformance.spec.collectives.perform import assert_taken, perform
from conformance.spec.collectives.strategies import calls

OPS = [
    pytest.param("all_reduce", marks=covers("all_reduce/shapes")),
    pytest.param("reduce", marks=covers("reduce/shapes")),
    pytest.param("broadcast", marks=covers("broadcast/shapes")),
    pytest.param("all_gather", marks=covers("all_gather/shapes")),
    pytest.param("all_gather_into_tensor", marks=covers("all_gather_into_tensor/shapes")),
    pytest.param("gather", marks=covers("gather/shapes")),
    pytest.param("scatter", marks=covers("scatter/shapes")),
    pytest.param("reduce_scatter", marks=covers("reduce_scatter/shapes")),
    pytest.param("reduce_scatter_tensor", marks=covers("reduce_scatter_tensor/shapes")),
    pytest.param("all_to_all", marks=covers("all_to_all/shapes")),
    pytest.param("all_to_all_single", marks=covers("all_to_all_single/shapes")),
]


@pytest.mark.parametrize("op", OPS)
@world_sizes(2, 3)
@given(data=st.data())
@settings(max_examples=40)
def test_any_call_gives_what_the_oracle_says(ranks: Ranks, op: str, data: st.DataObject) -> None:
    call = data.draw(calls(op, ranks.target, ranks.world_size), label="call")
    assert_taken(call, ranks.run(perform, call))
