"""Every ReduceOp on every dtype, against numpy, without any communication."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed import ReduceOp

from impl.gloo.requests.reduce_ops import NARROW_FLOATS, check_complex, op_name, reduction

INTEGERS = (
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
)
ALL_OPS = (
    ReduceOp.SUM,
    ReduceOp.PRODUCT,
    ReduceOp.MIN,
    ReduceOp.MAX,
    ReduceOp.BAND,
    ReduceOp.BOR,
    ReduceOp.BXOR,
)


def fold(op: Any, parts: list[Tensor]) -> Tensor:
    out = torch.empty_like(parts[0])
    reduction(op, parts[0].dtype).combine.fold(out, parts)
    return out


def average(parts: list[Tensor]) -> Tensor:
    chosen = reduction(ReduceOp.AVG, parts[0].dtype)
    staged = [chosen.stage(part) for part in parts]
    reduced = torch.empty_like(staged[0])
    chosen.combine.fold(reduced, staged)
    out = torch.empty_like(parts[0])
    chosen.conclude(reduced, out, len(parts))
    return out


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("op", ALL_OPS, ids=op_name)
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_integers_wrap_and_compare_as_numpy_does(op: Any, dtype: torch.dtype, count: int) -> None:
    random = np.random.default_rng(count)
    numpy_dtype = torch.empty(0, dtype=dtype).numpy().dtype
    info = np.iinfo(numpy_dtype)
    arrays = [
        random.integers(info.min, info.max, 37, dtype=numpy_dtype, endpoint=True)
        for _ in range(count)
    ]
    ufunc = {
        "sum": np.add,
        "product": np.multiply,
        "min": np.minimum,
        "max": np.maximum,
        "band": np.bitwise_and,
        "bor": np.bitwise_or,
        "bxor": np.bitwise_xor,
    }[op_name(op)]
    want = functools.reduce(ufunc, arrays)
    got = fold(op, [torch.from_numpy(array) for array in arrays])
    np.testing.assert_array_equal(got.numpy(), want)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("op", ALL_OPS, ids=op_name)
def test_pairwise_and_folded_agree(op: Any, dtype: torch.dtype) -> None:
    parts = [torch.arange(1, 12).to(dtype) * factor for factor in (1, 3, 2)]
    accumulator = parts[0].clone()
    combine = reduction(op, dtype).combine
    for part in parts[1:]:
        combine(accumulator, part)
    assert torch.equal(accumulator, fold(op, parts))


@pytest.mark.parametrize("aliased", [0, 1])
def test_the_result_may_be_one_of_the_first_two_parts(aliased: int) -> None:
    parts = [torch.arange(5.0) + rank for rank in range(3)]
    want = parts[0] + parts[1] + parts[2]
    reduction(ReduceOp.SUM, torch.float32).combine.fold(parts[aliased], parts)
    assert torch.equal(parts[aliased], want)


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.BOR, ReduceOp.MAX])
def test_bool_is_logical_or(op: Any) -> None:
    parts = [torch.tensor([True, True, False]), torch.tensor([True, False, False])]
    out = fold(op, parts)
    # torch's gloo leaves the byte 2 in the first element
    assert out.view(torch.uint8).tolist() == [1, 1, 0]


def test_bool_product_is_and_and_bxor_is_xor() -> None:
    parts = [torch.tensor([True, True, False])] * 2 + [torch.tensor([True, False, False])]
    assert fold(ReduceOp.PRODUCT, parts).tolist() == [True, False, False]
    assert fold(ReduceOp.BXOR, parts).tolist() == [True, False, False]


@pytest.mark.parametrize("dtype", sorted(NARROW_FLOATS, key=str), ids=str)
def test_narrow_floats_are_rounded_once(dtype: torch.dtype) -> None:
    # 1 + eps/2 + eps/2: rounding after each step would lose both halves
    eps = torch.finfo(dtype).eps
    values = [1.0, eps / 2, eps / 2]
    parts = [torch.tensor([value]).to(dtype) for value in values]
    want = torch.tensor([sum(float(part) for part in parts)]).to(dtype)
    assert fold(ReduceOp.SUM, parts).float().tolist() == want.float().tolist()


@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX], ids=op_name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("holder", [0, 1, 2])
def test_nan_wins_whichever_rank_holds_it(op: Any, dtype: torch.dtype, holder: int) -> None:
    parts = [torch.tensor([float(rank), float(rank)], dtype=dtype) for rank in range(3)]
    parts[holder][0] = torch.nan
    out = fold(op, parts)
    assert out[0].isnan()
    assert not out[1].isnan()


def test_average_of_integers_truncates_and_does_not_wrap() -> None:
    parts = [torch.tensor([4, -7]).int(), torch.tensor([7, 4]).int()]
    assert average(parts).tolist() == [5, -1]
    hundred = torch.tensor([100], dtype=torch.uint8)
    assert average([hundred] * 3).tolist() == [100]
    big = torch.tensor([2**63], dtype=torch.uint64)
    assert average([big]).tolist() == [2**63]


def test_average_of_half_does_not_overflow_on_the_way() -> None:
    part = torch.full((3,), 60000.0, dtype=torch.float16)
    assert average([part, part]).tolist() == [60000.0] * 3


def test_average_of_floats() -> None:
    assert average([torch.tensor([1.0]), torch.tensor([2.0])]).tolist() == [1.5]


@pytest.mark.parametrize("op", [ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR], ids=op_name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bitwise_needs_integers(op: Any, dtype: torch.dtype) -> None:
    with pytest.raises(RuntimeError, match=r"Cannot use ReduceOp\.B.* with non-integral dtype"):
        reduction(op, dtype)


def test_refusals_keep_torchs_words() -> None:
    with pytest.raises(RuntimeError, match=r"Cannot use ReduceOp\.PREMUL_SUM"):
        reduction(ReduceOp.PREMUL_SUM, torch.float32)
    with pytest.raises(RuntimeError, match="Invalid scalar type"):
        reduction(ReduceOp.SUM, torch.complex64)
    with pytest.raises(RuntimeError, match="AVG"):
        reduction(ReduceOp.AVG, torch.bool)


@pytest.mark.parametrize("op", [ReduceOp.MAX, ReduceOp.MIN, ReduceOp.PRODUCT, ReduceOp.BAND])
def test_complex_numbers_only_add(op: Any) -> None:
    check_complex("reduce", ReduceOp.SUM)
    check_complex("reduce", ReduceOp.AVG)
    with pytest.raises(
        ValueError, match=r"reduce does not support ReduceOp\.\w+ on complex tensors"
    ):
        check_complex("reduce", op)


def test_both_spellings_of_an_operation_are_one() -> None:
    assert op_name(ReduceOp(ReduceOp.MAX)) == op_name(ReduceOp.MAX) == "max"


@pytest.mark.parametrize(
    "dtype", [*sorted(NARROW_FLOATS, key=str), *INTEGERS, torch.float32], ids=str
)
def test_an_average_travels_in_its_own_type_among_cpp_ranks(dtype: torch.dtype) -> None:
    chosen = reduction(ReduceOp.AVG, dtype, widens=False)
    tensor = torch.ones(3).to(dtype)
    assert chosen.stage(tensor) is tensor
