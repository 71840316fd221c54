"""Collectives on tensors with torch's neg bit or conj bit, such as lazy x.conj() and its imag."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from conformance import (
    Chapter,
    Me,
    Ranks,
    assert_each_rank,
    assert_that,
    covers,
    not_probed,
    world_sizes,
)
from conformance.oracle.collectives import Call, after, before, receives
from conformance.oracle.lazy_bits import plain, with_conj_bit, with_neg_bit
from conformance.spec.collectives.perform import issue
from conformance.spec.parameters import ops

chapter = Chapter("collectives", source="torch 2.13 docs, Tensor.resolve_conj")


# A refusal of an operation or dtype that is not claimed says nothing of these bits.
pytestmark = not_probed()


WITH_BIT = {"float32": with_neg_bit, "complex64": with_conj_bit}


def perform_with_bit(me: Me, call: Call, side: str) -> tuple[list[Tensor], list[Tensor]] | str:
    """What was given and taken, where the tensors of one side have the bit; or the words of the
    refusal."""
    buffers = before(call, me.rank, me.world_size)
    given = [x.to(me.device) for x in buffers.given]
    taken = [x.to(me.device) for x in buffers.taken]
    lazy = WITH_BIT[call.dtype]
    if side in ("given", "both"):
        given = [lazy(x) for x in given]
    if side in ("taken", "both"):
        taken = [lazy(x) for x in taken]
    try:
        issue(call, given, taken)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return [plain(x) for x in given], [plain(x) for x in taken]


def check_with_bit(ranks: Ranks, op: str, dtype: str, side: str, reduce_op: str = "sum") -> None:
    """All ranks have the right values, or all ranks were told why not."""
    n = ranks.world_size
    call = Call(op, (3, 2), dtype, reduce_op)
    got: list[Any] = ranks.run(perform_with_bit, call, side)
    if all(isinstance(one, str) for one in got):
        says = {"float32": "neg", "complex64": "conj"}[dtype]
        for rank, words in enumerate(got):
            assert_that(says in words, f"the refusal does not say {says}: {words!r}", rank)
        return
    judged = [rank for rank in range(n) if receives(call, rank)]
    want = [after(call, rank, n) for rank in judged]
    assert_each_rank(
        [got[rank] for rank in judged],
        [(list(w.given), list(w.taken)) for w in want],
        what=f"{call}, {side} with the bit",
        ranks=judged,
    )


SCATTERING = ops("reduce_scatter", "reduce_scatter_tensor")
MOVING = ops("all_gather", "all_gather_into_tensor", "all_to_all", "all_to_all_single")
READING = [*MOVING, *SCATTERING]


@chapter.must(
    "negated/read",
    "Collectives that only read an input with the neg bit, such as x.conj().imag, read its "
    "values and not its raw memory, or all ranks refuse it.",
    source="torch 2.13 docs, Tensor.resolve_neg",
    rests_on="all_gather/values",
)
@world_sizes(2, 3)
@pytest.mark.parametrize("op", [*READING, *ops("gather")])
def test_inputs_with_the_neg_bit(ranks: Ranks, op: str) -> None:
    check_with_bit(ranks, op, "float32", "given")


@chapter.must(
    "negated/scatter",
    "scatter from or into tensors with the neg bit moves their values, or all ranks refuse them.",
    source="torch 2.13 docs, Tensor.resolve_neg",
    needs="op:scatter",
    rests_on="scatter/values",
)
@world_sizes(2, 3)
@pytest.mark.parametrize("side", ["given", "both"])
def test_scatter_with_the_neg_bit(ranks: Ranks, side: str) -> None:
    check_with_bit(ranks, "scatter", "float32", side)


@chapter.should(
    "negated/written",
    "Collectives that fill a tensor with the neg bit, or work on it in place, leave the right "
    "values in it, or all ranks refuse it.",
    source="torch 2.13 docs, Tensor.resolve_neg",
    needs="reduce_op:max",
    rests_on=("all_reduce/sum", "all_reduce/strided"),
)
@world_sizes(2, 3)
@pytest.mark.parametrize("op", ["all_reduce", *ops("reduce", "broadcast"), *READING])
def test_outputs_with_the_neg_bit(ranks: Ranks, op: str) -> None:
    """By MAX: negation turns the greatest value into the least in memory; a sum would not tell."""
    check_with_bit(ranks, op, "float32", "taken", "max")


@chapter.must(
    "conjugated/read",
    "Collectives that only read an input with the conj bit, such as x.conj(), read its values "
    "and not its raw memory, or all ranks refuse it.",
    needs="dtype:complex64",
    rests_on="all_gather/values",
)
@world_sizes(2, 3)
@pytest.mark.parametrize("op", READING)
def test_inputs_with_the_conj_bit(ranks: Ranks, op: str) -> None:
    check_with_bit(ranks, op, "complex64", "given")


@chapter.should(
    "conjugated/gather",
    "gather reads the values of a tensor with the conj bit and not its raw memory, or all ranks "
    "refuse it with an error that says so.",
    needs=("dtype:complex64", "op:gather"),
)
@world_sizes(2, 3)
def test_gather_with_the_conj_bit(ranks: Ranks) -> None:
    check_with_bit(ranks, "gather", "complex64", "given")


@chapter.must(
    "conjugated/written",
    "Collectives that fill a tensor with the conj bit, or work on it in place, leave the right "
    "values in it, or all ranks refuse it.",
    needs="dtype:complex64",
    rests_on="all_reduce/sum",
)
@world_sizes(2, 3)
@pytest.mark.parametrize("op", ["all_reduce", *ops("broadcast"), *MOVING])
def test_outputs_with_the_conj_bit(ranks: Ranks, op: str) -> None:
    check_with_bit(ranks, op, "complex64", "taken")


@covers("conjugated/written")
@world_sizes(2, 3)
@pytest.mark.parametrize("op", ops("scatter"))
def test_scatter_with_the_conj_bit(ranks: Ranks, op: str) -> None:
    check_with_bit(ranks, op, "complex64", "both")


@chapter.must(
    "conjugated/reduced",
    "reduce and all forms of reduce_scatter leave the sum of the values, and not of the raw "
    "memory, in tensors with the conj bit, or all ranks refuse them.",
    needs="dtype:complex64",
    rests_on="all_reduce/sum",
)
@world_sizes(2, 3)
@pytest.mark.parametrize("op", [*ops("reduce"), *SCATTERING])
def test_sums_in_tensors_with_the_conj_bit(ranks: Ranks, op: str) -> None:
    check_with_bit(ranks, op, "complex64", "taken")
