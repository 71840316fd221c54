"""Comparisons: the first difference of two values, and distances in units in the last place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance import CheckFailed, assert_each_rank, assert_same_on_all_ranks, assert_that
from conformance.checks import first_difference, ulps_apart
from conformance.checks.traces import assert_same_trace

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
NARROW = [torch.float8_e4m3fn, torch.float8_e5m2]


@dataclass
class Pair:
    first: torch.Tensor
    second: int


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_neighbours_are_one_unit_apart(dtype: torch.dtype) -> None:
    x = torch.tensor([1.0, -1.0, 0.0, 65504.0, 1e30], dtype=dtype)
    up = torch.nextafter(x, torch.full_like(x, float("inf")))
    assert ulps_apart(up, x).tolist() == [1, 1, 1, 1, 1]
    assert ulps_apart(x, x).tolist() == [0, 0, 0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_count_their_own_units(dtype: torch.dtype) -> None:
    one = torch.tensor([1.0], dtype=dtype)
    above = one + torch.finfo(dtype).eps
    assert ulps_apart(above, one).item() == 1


@pytest.mark.parametrize("dtype", [*FLOATS, *NARROW])
def test_the_sign_of_zero_and_nan_count(dtype: torch.dtype) -> None:
    zero, minus = torch.tensor([0.0]).to(dtype), torch.tensor([-0.0]).to(dtype)
    nan = torch.tensor([float("nan")]).to(dtype)
    assert ulps_apart(minus, zero).tolist() == [1]
    assert ulps_apart(nan, nan).tolist() == [0]
    assert ulps_apart(nan, zero).tolist() == [float("inf")]


@given(st.floats(width=32, allow_nan=False), st.floats(width=32, allow_nan=False))
def test_distances_are_symmetric_and_zero_for_the_same_bits_alone(a: float, b: float) -> None:
    x, y = torch.tensor([a]), torch.tensor([b])
    apart = ulps_apart(x, y).item()
    assert apart == ulps_apart(y, x).item()
    assert (apart == 0) == torch.equal(x.view(torch.int32), y.view(torch.int32))


def test_integers_are_apart_by_their_difference() -> None:
    assert ulps_apart(torch.tensor([5, 7]), torch.tensor([5, 9])).tolist() == [0, 2]
    big = torch.tensor([2**62 + 1])
    assert ulps_apart(big, big - 1).item() == 1, "equal as float64, and yet different"
    assert ulps_apart(torch.tensor([True]), torch.tensor([False])).item() == 1


@pytest.mark.parametrize(
    ("got", "want", "says"),
    [
        (1, 1, None),
        (float("nan"), float("nan"), None),
        (1, 1.0, "got int 1, want float 1.0"),
        (torch.ones(2), [1.0, 1.0], "got float32 (2,), want list [1.0, 1.0]"),
        (torch.ones(2), torch.ones(3), "got float32 (2,), want float32 (3,)"),
        (torch.ones(2), torch.ones(2).double(), "got float32 (2,), want float64 (2,)"),
        (torch.ones(2), torch.ones(2).to_sparse(), "want float32 (2,) sparse_coo"),
        ((1, 2), (1, 3), "at [1]: got 2, want 3"),
        ([1], [1, 2], "got 1 values, want 2"),
        (["too late"], [], "got 1 values, want 0; the first is str 'too late'"),
        (["x" * 400], [], "the first is str '" + "x" * 292 + "..."),
        ({"a": 1}, {"b": 1}, "got keys ['a'], want ['b']; ['a'] is int 1"),
        ({"b": 2, "a": 1}, {"a": 1, "b": 2}, "got keys ['b', 'a'], want ['a', 'b']"),
        ({"a": [torch.zeros(2)]}, {"a": [torch.ones(2)]}, "at ['a'][0]: 2 of 2 elements differ"),
        (
            Pair(torch.zeros(1), 1),
            Pair(torch.zeros(1), 2),
            "at ['second']: got 1, want 2",
        ),
        (
            torch.tensor([1 + 1j]),
            torch.tensor([1 + 2j]),
            "at .as_real(): 1 of 2 elements differ, in float32 (1, 2)\n"
            "  first at [0, 1]: got 1.0, want 2.0",
        ),
        (
            torch.tensor([0, 1.0]).to_sparse(),
            torch.tensor([0, 2.0]).to_sparse(),
            "at .values(): 1 of 1 elements differ",
        ),
        (torch.tensor(True), torch.tensor(False), "first at []: got True, want False"),
    ],
)
def test_the_first_difference_is_told(got: Any, want: Any, says: str | None) -> None:
    found = first_difference(got, want)
    assert (says is None) == (found is None)
    if says is not None:
        assert says in str(found)


def of_every_layout(change: float) -> dict[str, Any]:
    """Values that consist of several parts, or of none; all but the last depend on the change."""
    x = torch.eye(4) * (1 + change)
    rows = [torch.ones(2), torch.full((3,), 1 + change)]
    return {
        "coo": x.to_sparse(),
        "csr": x.to_sparse_csr(),
        "csc": x.to_sparse_csc(),
        "bsr": x.to_sparse_bsr((2, 2)),
        "bsc": x.to_sparse_bsc((2, 2)),
        "quantized": torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
        "nested": torch.nested.nested_tensor(rows, layout=torch.strided),
        "jagged": torch.nested.nested_tensor(rows, layout=torch.jagged),
        "numpy": np.array([float("nan"), 1 + change]),
        "meta": x.to("meta"),
    }


@pytest.mark.filterwarnings("ignore")  # that some layouts may change, and quantizing goes
def test_tensors_of_every_layout_are_compared_by_what_they_hold() -> None:
    mine, same, other = of_every_layout(0.0), of_every_layout(0.0), of_every_layout(0.5)
    assert [k for k in mine if first_difference(mine[k], same[k])] == []
    assert [k for k in mine if not first_difference(mine[k], other[k])] == ["meta"]
    assert str(first_difference(other["csr"], mine["csr"])).startswith("at .values(): 4 of 4")
    assert "got float32 (2, nested), want" in str(first_difference(mine["nested"], mine["coo"]))


def test_what_cannot_be_shown_is_named_by_its_type() -> None:
    class NotShown:
        def __repr__(self) -> str:
            raise ZeroDivisionError

    assert "NotShown object at" in str(first_difference(NotShown(), NotShown()))
    assert "want int 1" in str(first_difference(NotShown(), 1))
    assert "int object at" in str(first_difference(10**5000, 1))


def test_units_in_the_last_place_are_told_and_may_be_allowed() -> None:
    want = torch.tensor([1.0, 2.0, 3.0])
    got = want.clone()
    got[2] = torch.nextafter(got[2], torch.tensor(9.0))
    assert str(first_difference(got, want)) == (
        "1 of 3 elements differ, in float32 (3,)\n"
        "  first at [2]: got 3.000000238418579, want 3.0\n"
        "  error: 1 units in the last place"
    )
    assert first_difference(got, want, within_ulps=1) is None
    got[2] = 4.0
    assert "(allowed: 1 units in the last place)" in str(first_difference(got, want, within_ulps=1))


def test_the_rank_that_differs_is_named() -> None:
    values = [torch.tensor([1.0]), torch.tensor([1.0]), torch.tensor([2.0])]
    with pytest.raises(CheckFailed, match=r"rank 2 \(got\) and rank 0 \(want\) differ") as failed:
        assert_same_on_all_ranks(values)
    assert (failed.value.rank, failed.value.want) == (2, None)
    with pytest.raises(CheckFailed, match="result: rank 0 is wrong") as failed:
        assert_same_on_all_ranks(values, torch.tensor([3.0]), what="result")
    assert failed.value.want == [torch.tensor([3.0])] * 3
    assert failed.value.got is values
    with pytest.raises(ValueError, match="3 ranks returned, and 1 values are expected"):
        assert_each_rank(values, [1])
    with pytest.raises(ValueError, match="no rank's value is given"):
        assert_each_rank([], [])
    assert_each_rank([], [], ranks=[])
    with pytest.raises(ValueError, match="no rank's value is given"):
        assert_same_on_all_ranks([])
    with pytest.raises(CheckFailed, match="rank 3 is wrong") as failed:
        assert_each_rank(values[1:], [torch.tensor([1.0])] * 2, ranks=[1, 3])
    assert (failed.value.rank, failed.value.want) == (3, [torch.tensor([1.0])] * 2)
    with pytest.raises(CheckFailed, match="because"):
        assert_that(False, "because")


def test_ranks_may_be_near_what_is_wanted_and_must_be_equal_among_each_other() -> None:
    want = torch.tensor([1.0])
    near = torch.nextafter(want, torch.tensor([2.0]))
    assert_same_on_all_ranks([near, near], want, within_ulps=1)
    with pytest.raises(CheckFailed, match=r"rank 1 \(got\) and rank 0 \(want\) differ"):
        assert_same_on_all_ranks([near, want], want, within_ulps=1)


def test_traces_part_where_they_differ_first() -> None:
    assert_same_trace(["a", "b"], ["a", "b"])
    with pytest.raises(CheckFailed) as parted:
        assert_same_trace(["a", "b", "x"], ["a", "b", "c", "d"], what="DDP")
    assert str(parted.value) == (
        "DDP: the traces part at operation 2\n"
        "  both  a\n  both  b\n  got   x\n  want  c\n"
        "  of 3 (got) and 4 (want) operations"
    )
    with pytest.raises(CheckFailed, match=r"got   \(nothing more\)"):
        assert_same_trace(["a"], ["a", "b"])


@given(st.floats(allow_nan=False), st.floats(allow_nan=False))
def test_float64_is_told_apart_to_the_last_bit(a: float, b: float) -> None:
    x, y = torch.tensor([a], dtype=torch.float64), torch.tensor([b], dtype=torch.float64)
    same_bits = torch.equal(x.view(torch.int64), y.view(torch.int64))
    assert (ulps_apart(x, y).item() == 0) == same_bits


def test_a_number_far_off_is_not_counted_in_units_in_the_last_place() -> None:
    def error(got: float, want: float) -> str:
        found = first_difference(torch.tensor([got]), torch.tensor([want]))
        return str(found).splitlines()[-1].strip()

    assert error(0.8515625, 103.0) == "error: 102 absolute, 0.99 relative"
    assert error(1.5, 0.0) == "error: 1.5 absolute"
    assert error(float("nan"), 1.0) == "error: nan absolute, nan relative"
    assert error(float("inf"), -1.0) == "error: inf absolute, inf relative"
    assert error(1.001, 1.0) == "error: 0.001 absolute, 0.001 relative"


def test_all_wrong_ranks_are_named_and_the_first_is_shown() -> None:
    values = [torch.tensor([float(rank)]) for rank in range(12)]
    with pytest.raises(CheckFailed, match=r"^rank 1 is wrong, and so is rank 2\n") as failed:
        assert_each_rank(values[:3], [torch.zeros(1)] * 3)
    assert failed.value.ranks == (1, 2)
    with pytest.raises(CheckFailed, match=r"so are ranks 2, 3, 4, 5, 6, 7, 8, 9 and 2 more\n"):
        assert_each_rank(values, [torch.zeros(1)] * 12)
