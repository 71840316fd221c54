"""Bucket assignment: against torch's own, and its rules one by one."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from impl.ddp import compute_bucket_assignment_by_size
from impl.ddp.buckets.assignment import BYTES_PER_MB, BucketCaps, assign_in_ready_order

DTYPES = (torch.float32, torch.float64, torch.float16, torch.complex64)


def tensors_of(sizes: list[tuple[int, torch.dtype]]) -> list[torch.Tensor]:
    return [torch.empty(numel, dtype=dtype) for numel, dtype in sizes]


sizes_and_dtypes = st.lists(
    st.tuples(st.integers(0, 40), st.sampled_from(DTYPES)), min_size=1, max_size=20
)
limit_lists = st.lists(st.integers(0, 400), min_size=1, max_size=4)


@given(sizes_and_dtypes, limit_lists, st.data())
def test_agrees_with_torch_in_registration_order(
    sizes: list[tuple[int, torch.dtype]], limits: list[int], data: st.DataObject
) -> None:
    tensors = tensors_of(sizes)
    sparse = data.draw(st.lists(st.booleans(), min_size=len(tensors), max_size=len(tensors)))
    ours = compute_bucket_assignment_by_size(tensors, limits, sparse)
    theirs = dist._compute_bucket_assignment_by_size(tensors, limits, sparse)
    assert ours == theirs


@given(sizes_and_dtypes, limit_lists, st.data())
def test_agrees_with_torch_in_ready_order(
    sizes: list[tuple[int, torch.dtype]], limits: list[int], data: st.DataObject
) -> None:
    tensors = tensors_of(sizes)
    order = data.draw(st.permutations(range(len(tensors))))
    sparse = data.draw(st.lists(st.booleans(), min_size=len(tensors), max_size=len(tensors)))
    shuffled = [tensors[index] for index in order]
    ours = compute_bucket_assignment_by_size(shuffled, limits, sparse, order)
    theirs = dist._compute_bucket_assignment_by_size(shuffled, limits, sparse, order)
    assert ours == theirs


@given(sizes_and_dtypes, limit_lists)
def test_every_index_is_in_exactly_one_bucket_of_its_kind(
    sizes: list[tuple[int, torch.dtype]], limits: list[int]
) -> None:
    tensors = tensors_of(sizes)
    buckets, bucket_limits = compute_bucket_assignment_by_size(tensors, limits)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(tensors)))
    assert len(bucket_limits) == len(buckets)
    for bucket in buckets:
        assert len({tensors[index].dtype for index in bucket}) == 1


def test_a_limit_closes_the_bucket_that_reaches_it() -> None:
    tensors = tensors_of([(100, torch.float32), (200, torch.float32), (100, torch.float32)])
    assert compute_bucket_assignment_by_size(tensors, [400]) == ([[0], [1], [2]], [400, 400, 400])


def test_each_dtype_walks_through_the_limits_by_itself() -> None:
    tensors = tensors_of([(50, torch.float32), (25, torch.float64)] * 3)
    buckets, limits = compute_bucket_assignment_by_size(tensors, [200, 400])
    assert buckets == [[0], [1], [2, 4], [3, 5]]
    assert limits == [200, 200, 400, 400]


def test_a_sparse_gradient_is_alone_and_without_limit() -> None:
    tensors = tensors_of([(2, torch.float32)] * 3)
    buckets, limits = compute_bucket_assignment_by_size(tensors, [1000], [False, True, False])
    assert (buckets, limits) == ([[0, 2], [1]], [1000, 0])


class Notes:
    def __init__(self) -> None:
        self.errors: list[str] = []

    def set_error_and_log(self, error: str) -> None:
        self.errors.append(error)


@pytest.mark.parametrize(
    ("tensors", "limits", "sparse", "indices", "message"),
    [
        ([], [1], [], [], "at least one tensor"),
        ([torch.ones(1)], [], [], [], "at least one bucket size limit"),
        ([torch.ones(1)], [1], [True, False], [], "2 entries for 1 tensors"),
        ([torch.ones(1)], [1], [], [0, 1], "tensor_indices has 2 entries"),
        ([torch.ones(1).to_sparse()], [1], [], [], "No support for sparse tensors."),
    ],
)
def test_wrong_arguments_are_noted_and_raised(
    tensors: list[torch.Tensor],
    limits: list[int],
    sparse: list[bool],
    indices: list[int],
    message: str,
) -> None:
    notes = Notes()
    with pytest.raises(RuntimeError, match=message):
        compute_bucket_assignment_by_size(tensors, limits, sparse, indices, notes)
    assert len(notes.errors) == 1


def test_default_caps_begin_with_a_small_bucket() -> None:
    caps = BucketCaps.from_megabytes(None, None)
    assert caps.bucket_bytes_cap == 25 * BYTES_PER_MB
    assert caps.first_bucket_bytes_cap == BYTES_PER_MB
    assert caps.initial_limits(registration_order_is_final=True) == [
        BYTES_PER_MB,
        25 * BYTES_PER_MB,
    ]


def test_a_cap_of_the_user_is_for_all_buckets() -> None:
    caps = BucketCaps.from_megabytes(0.5, None)
    assert caps.first_bucket_bytes_cap == caps.bucket_bytes_cap == BYTES_PER_MB // 2
    assert caps.initial_limits(registration_order_is_final=True) == [BYTES_PER_MB // 2]


def test_caps_bucket_by_bucket_hold_from_the_start() -> None:
    caps = BucketCaps.from_megabytes(None, [1, 3, 2])
    assert caps.bucket_bytes_cap == 3 * BYTES_PER_MB
    limits = [1 * BYTES_PER_MB, 3 * BYTES_PER_MB, 2 * BYTES_PER_MB]
    assert caps.initial_limits(registration_order_is_final=False) == limits


def test_one_bucket_until_the_order_is_known() -> None:
    caps = BucketCaps.from_megabytes(1, None)
    assert caps.initial_limits(registration_order_is_final=False) == [sys.maxsize]


def test_the_small_bucket_may_be_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    params = tensors_of([(10, torch.float32)] * 5)  # 40 bytes each
    order = [4, 3, 2, 1, 0]
    first = assign_in_ready_order(params, order, [40, 80], [False] * 5)
    assert (first.buckets, first.limits) == ([[4], [3, 2], [1, 0]], [40, 80, 80])
    monkeypatch.setenv("DDP_SET_LAST_BUCKET_CAP", "1")
    last = assign_in_ready_order(params, order, [40, 80], [False] * 5)
    assert (last.buckets, last.limits) == ([[3, 4], [1, 2], [0]], [80, 80, 40])
