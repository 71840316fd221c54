"""Every dtype: collectives that move data keep each bit of it, and those that reduce support it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from conformance import Chapter, Me, Ranks, adapts, assert_each_rank, world_sizes
from conformance.capabilities import DTYPES
from conformance.oracle.collectives import Call, after
from conformance.oracle.layout import Layout
from conformance.spec.collectives.perform import (
    Placement,
    Seen,
    assert_nothing_else,
    assert_taken,
    perform,
)
from conformance.spec.parameters import dtypes

chapter = Chapter("collectives", source="torch 2.13 docs, torch.dtype")


MOVING = [
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "scatter",
    "all_to_all",
    "all_to_all_single",
]
REDUCING = ["all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor"]

# What a sum of bools means has a requirement of its own.
SUMMED = dtypes(*(name for name in DTYPES if name != "bool"))


BETWEEN = Placement(*[Layout(before=1, after=1)] * 2)  # other elements before and behind


def second(me: Me, call: Call) -> Seen:
    """What the call leaves if it comes after one like it with other values."""
    perform(me, replace(call, salt=call.salt + 1))
    return perform(me, call, BETWEEN)


def claimed(ranks: Ranks, ops: Sequence[str]) -> list[str]:
    """Those of the operations that the target has; without one, the case says nothing."""
    found = [op for op in ops if ranks.target.capabilities.has(f"op:{op}")]
    if not found:
        pytest.skip(f"none of {', '.join(ops)} is claimed")
    return found


@chapter.must(
    "dtypes/moved",
    "Every collective that only moves elements transfers this dtype bit for bit, also in the "
    "second of two calls, and writes nothing around its outputs.",
    rests_on=("broadcast/values", "all_gather/values"),
)
@adapts()
@pytest.mark.parametrize("dtype", dtypes(*DTYPES))
@world_sizes(2, 3)
def test_a_dtype_is_moved(ranks: Ranks, dtype: str) -> None:
    gathered = [] if dtype.startswith("complex") else ["gather"]
    for op in claimed(ranks, [*MOVING, *gathered]):
        call = Call(op, (5,), dtype, raw=True)
        seen = ranks.run(second, call)
        got = [[bytes_of(x) for x in each.taken] for each in seen]
        want = [
            [bytes_of(x) for x in after(call, rank, ranks.world_size).taken]
            for rank in range(ranks.world_size)
        ]
        assert_each_rank(got, want, what=f"the bytes of {call}")
        assert_nothing_else(call, seen, [BETWEEN] * len(seen))


def bytes_of(x: Tensor) -> Tensor:
    """Not as numbers: two NaN may differ in their bits."""
    return x.view(torch.uint8)


@chapter.must(
    "dtypes/reduced",
    "Every collective that reduces supports this dtype, and writes nothing around its outputs.",
    rests_on=("all_reduce/sum", "reduce_scatter/sum"),
)
@adapts()
@pytest.mark.parametrize("dtype", SUMMED)
@world_sizes(2, 3)
def test_a_dtype_is_reduced(ranks: Ranks, dtype: str) -> None:
    for op in claimed(ranks, REDUCING):
        call = Call(op, (5,), dtype)
        seen = ranks.run(second, call)
        assert_taken(call, seen)
        assert_nothing_else(call, seen, [BETWEEN] * len(seen))
