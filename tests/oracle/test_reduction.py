"""Reductions, against results worked out by hand."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from conformance.oracle.data import dtype_named, noise, noisy_factors
from conformance.oracle.reduction import is_defined, reduced, rounded


def same(got: Tensor, want: list[object], dtype: torch.dtype) -> None:
    assert got.dtype is dtype
    torch.testing.assert_close(got, torch.tensor(want, dtype=dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("op", "want"),
    [
        ("sum", [9, 5]),
        ("avg", [4, 2]),
        ("product", [18, 4]),
        ("min", [3, 1]),
        ("max", [6, 4]),
        ("band", [2, 0]),
        ("bor", [7, 5]),
        ("bxor", [5, 5]),
    ],
)
def test_integers(op: str, want: list[object]) -> None:
    got = reduced(op, [torch.tensor([6, 1], dtype=torch.int32), torch.tensor([3, 4]).int()])
    same(got, want, torch.int32)


def test_integers_wrap_around() -> None:
    hundreds = [torch.tensor([100], dtype=torch.uint8)] * 3
    same(reduced("sum", hundreds), [44], torch.uint8)
    signed = [torch.tensor([100], dtype=torch.int8)] * 2
    same(reduced("sum", signed), [-56], torch.int8)
    same(reduced("product", signed), [16], torch.int8)
    big = torch.tensor([(1 << 63) - 1])
    same(reduced("sum", [big, torch.tensor([1])]), [-(1 << 63)], torch.int64)


def test_an_average_of_integers_is_cut_towards_zero() -> None:
    values = [torch.tensor([4, 1, -1, -3]), torch.tensor([6, 2, -2, -4])]
    same(reduced("avg", values), [5, 1, -1, -3], torch.int64)


def test_an_average_of_integers_does_not_overflow() -> None:
    big = torch.tensor([(1 << 63) - 1])
    same(reduced("avg", [big, big, big]), [(1 << 63) - 1], torch.int64)


def test_unsigned_dtypes_that_torch_cannot_add() -> None:
    values = [torch.tensor([40000], dtype=torch.int64).to(torch.uint16)] * 2
    assert reduced("sum", values).to(torch.int64).tolist() == [80000 - 65536]


def test_floats() -> None:
    values = [torch.tensor([60000.0, -1.0]).half(), torch.tensor([60000.0, 2.0]).half()]
    same(reduced("sum", values), [math.inf, 1.0], torch.float16)
    same(reduced("avg", values), [60000.0, 0.5], torch.float16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_nan_is_least_and_greatest(dtype: torch.dtype) -> None:
    values = [torch.tensor([math.nan, 1.0], dtype=dtype), torch.tensor([1.0, 3.0], dtype=dtype)]
    for order in (values, values[::-1]):
        same(reduced("min", order), [math.nan, 1.0], dtype)
        same(reduced("max", order), [math.nan, 3.0], dtype)


def test_bools() -> None:
    rows = [torch.tensor(row, dtype=torch.bool) for row in ([0, 0, 1, 1], [0, 1, 0, 1])]
    for op in ("sum", "max", "bor"):
        same(reduced(op, rows), [False, True, True, True], torch.bool)
    for op in ("product", "min", "band"):
        same(reduced(op, rows), [False, False, False, True], torch.bool)
    same(reduced("bxor", rows), [False, True, True, False], torch.bool)


def test_complex_numbers() -> None:
    values = [torch.tensor([1 + 2j]), torch.tensor([2 - 3j])]
    same(reduced("sum", values), [3 - 1j], torch.complex64)
    same(reduced("avg", values), [1.5 - 0.5j], torch.complex64)


def test_a_number_stays_a_number() -> None:
    assert reduced("sum", [torch.tensor(1.0), torch.tensor(2.0)]).shape == ()
    assert reduced("avg", [torch.tensor(1), torch.tensor(3)]).item() == 2


def test_what_is_defined() -> None:
    assert is_defined("band", "int8")
    assert not is_defined("band", "float32")
    assert not is_defined("max", "complex64")
    assert is_defined("avg", "complex64")
    assert not is_defined("avg", "bool")


ROUNDING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "product": torch.mul,
    "avg": torch.add,
}


def noisy(op: str, dtype: str, ranks: int) -> list[Tensor]:
    make = noisy_factors if op == "product" else noise
    return [make((500,), dtype, rank) for rank in range(ranks)]


@pytest.mark.parametrize("op", ROUNDING)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_no_order_of_operations_exceeds_the_bound(op: str, dtype: str) -> None:
    given = noisy(op, dtype, 5)
    near = rounded(op, given)
    for order in itertools.permutations(given):
        total = functools.reduce(ROUNDING[op], order)
        assert not near.off(total / len(given) if op == "avg" else total).any()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_an_average_may_multiply_first(dtype: str) -> None:
    given = noisy("avg", dtype, 5)
    share = torch.tensor(1 / 5, dtype=given[0].dtype)
    assert (
        not rounded("avg", given).off(functools.reduce(torch.add, (x * share for x in given))).any()
    )


@pytest.mark.parametrize("op", ROUNDING)
@pytest.mark.parametrize(
    ("dtype", "narrower"),
    [("float16", "bfloat16"), ("float32", "float16"), ("float64", "float32")],
)
def test_what_is_computed_in_less_exceeds_the_bound(op: str, dtype: str, narrower: str) -> None:
    given = noisy(op, dtype, 4)
    through_less = [x.to(dtype_named(narrower)).to(x.dtype) for x in given]
    assert rounded(op, given).off(reduced(op, through_less)).any()


def test_parts_of_complex_numbers_are_bounded() -> None:
    given = [noise((500,), "complex64", rank) for rank in range(3)]
    near = rounded("sum", given)
    assert near.value.shape == (500, 2)
    assert not near.off(torch.view_as_real(reduced("sum", given))).any()
    through_half = [torch.view_as_complex(torch.view_as_real(x).half().float()) for x in given]
    assert near.off(torch.view_as_real(reduced("sum", through_half))).sum() > 250
