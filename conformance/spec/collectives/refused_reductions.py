"""Reductions that raise: bitwise of floats, MIN or MAX of complex, and ops that are no ReduceOp."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from conformance import (
    Chapter,
    Me,
    Ranks,
    assert_each_rank,
    assert_that,
    not_probed,
    world_sizes,
)
from conformance.oracle.collectives import Call
from conformance.spec.collectives.perform import REDUCE_OPS, assert_taken, perform
from conformance.spec.collectives.strategies import REDUCING

chapter = Chapter("collectives")

NOTHING = "nothing"


def refusals(me: Me, dtype: str, op: str) -> dict[str, tuple[str, str]]:
    """Kind and words of each collective's refusal, NOTHING and "" where it does not refuse."""
    found, kinds = {}, (ValueError, RuntimeError, TypeError)
    for collective in REDUCING:
        if not me.target.capabilities.has(f"op:{collective}"):
            continue
        try:
            perform(me, Call(collective, (3,), dtype), reduce_op=REDUCE_OPS[op])
        except kinds as error:
            kind = next(kind.__name__ for kind in kinds if isinstance(error, kind))
            found[collective] = kind, str(error)
        else:
            found[collective] = NOTHING, ""
    return found


@chapter.must(
    "reductions/bits-of-floats-refused",
    "BAND, BOR and BXOR of floating-point tensors are refused on every rank with an error that "
    "names the operation.",
    source="observed, torch 2.13.0 gloo: 'Cannot use ReduceOp.BAND with non-integral dtype'",
    needs=("reduce_op:band", "reduce_op:bor", "reduce_op:bxor"),
    rests_on="all_reduce/sum",
)
@not_probed()
@world_sizes(2)
@pytest.mark.parametrize("op", ["band", "bor", "bxor"])
def test_floats_have_no_bits(ranks: Ranks, op: str) -> None:
    for rank, found in enumerate(ranks.run(refusals, "float32", op)):
        for collective, (_, words) in found.items():
            assert_that(
                op.upper() in words,
                f"{collective}: {op.upper()} of float32 should be refused by its name: {words!r}",
                rank,
            )


WITHOUT_COMPLEX = ["min", "max", "product", "band", "bor", "bxor"]


@chapter.must(
    "reductions/complex-refused",
    "MIN, MAX and the bitwise operations of complex tensors are refused on every rank with an "
    "error that says complex. PRODUCT is refused so, too, or is right.",
    source="torch 2.13, supports_complex; pytorch#179633",
    needs="dtype:complex64",
    rests_on="all_reduce/sum",
)
@not_probed()
@world_sizes(2)
@pytest.mark.parametrize("op", WITHOUT_COMPLEX)
def test_complex_numbers_have_no_order(ranks: Ranks, op: str) -> None:
    by_rank = ranks.run(refusals, "complex64", op)
    for rank, found in enumerate(by_rank):
        for collective, (kind, words) in found.items():
            may_be_right = op == "product" and kind == NOTHING
            assert_that(
                may_be_right or "complex" in words,
                f"{collective}: {op.upper()} of complex64 should be refused as complex: {words!r}",
                rank,
            )
    for collective, (kind, _) in by_rank[0].items():
        if kind == NOTHING:
            call = Call(collective, (3,), "complex64", reduce_op=op)
            assert_taken(call, ranks.run(perform, call))


@chapter.should(
    "reductions/complex-refused-as-values",
    "all_reduce, reduce, reduce_scatter and reduce_scatter_tensor refuse these operations of "
    "complex tensors with a ValueError.",
    source="torch 2.13, all_reduce; pytorch#179633",
    needs="dtype:complex64",
    rests_on="reductions/complex-refused",
)
@not_probed()
@world_sizes(2)
@pytest.mark.parametrize("op", WITHOUT_COMPLEX)
def test_what_kind_of_error_it_is(ranks: Ranks, op: str) -> None:
    got = [
        {
            collective: kind
            for collective, (kind, _) in found.items()
            if op != "product" or kind != NOTHING
        }
        for found in ranks.run(refusals, "complex64", op)
    ]
    assert_each_rank(got, [dict.fromkeys(got[0], "ValueError")] * 2)


def wrong_kinds_of_op(me: Me) -> list[str]:
    """What comes of operations that are none."""
    raised = []
    for op in ("sum", 0, None):
        try:
            dist.all_reduce(torch.ones(2, device=me.device), op)
        except TypeError:
            raised.append("TypeError")
        else:
            raised.append(f"{op!r} was taken")
    return raised


@chapter.must(
    "reductions/not-an-op",
    "A string or a number in place of a ReduceOp is a TypeError.",
    source="observed, torch 2.13.0",
    rests_on="all_reduce/sum",
)
@world_sizes(2)
def test_an_op_must_be_a_reduce_op(ranks: Ranks) -> None:
    assert_each_rank(ranks.run(wrong_kinds_of_op), [["TypeError"] * 3] * 2)
