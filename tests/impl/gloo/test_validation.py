"""Refusals have the messages of torch's gloo."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from impl.gloo.requests import validation

ONE, TWO = torch.ones(2), torch.ones(3)


@pytest.mark.parametrize("root", [-1, 4])
def test_roots(root: int) -> None:
    validation.check_root("broadcast", 3, 4)
    with pytest.raises(
        RuntimeError, match=rf"ProcessGroupGloo::broadcast: invalid root rank: {root}"
    ):
        validation.check_root("broadcast", root, 4)


def test_root_tensor() -> None:
    validation.check_root_tensor("reduce", 0, 1)
    with pytest.raises(RuntimeError, match="invalid root tensor: 1"):
        validation.check_root_tensor("reduce", 1, 1)


def test_lists() -> None:
    with pytest.raises(RuntimeError, match="requires non-empty tensor list"):
        validation.check_not_empty("allreduce", [])
    with pytest.raises(RuntimeError, match="requires a single-element input tensor list"):
        validation.check_single_input("gather", [ONE, ONE])
    with pytest.raises(RuntimeError, match="requires a single-element output tensor list"):
        validation.check_single_output("scatter", [])
    with pytest.raises(
        RuntimeError, match="requires a single-element output list containing a list with 2 tensors"
    ):
        validation.check_list_on_root("gather", [], "output", 2)
    with pytest.raises(
        RuntimeError,
        match=r"Incorrect input list size 1\. Input list size should be 2, same as size of the "
        r"process group",
    ):
        validation.check_list_on_root("scatter", [[ONE]], "input", 2)
    with pytest.raises(RuntimeError, match="requires empty output on non-root"):
        validation.check_no_list_off_root("gather", [[ONE]], "output")


def test_likeness() -> None:
    validation.check_like("gather", [ONE, ONE + 1], ONE)
    with pytest.raises(RuntimeError, match="invalid tensor type at index 1"):
        validation.check_like("gather", [ONE, ONE.double()], ONE)
    with pytest.raises(
        RuntimeError, match=r"invalid tensor size at index 1 \(expected \(2,\), got \(3,\)\)"
    ):
        validation.check_like("gather", [ONE, TWO], ONE)


def test_layouts_and_devices() -> None:
    sparse = torch.sparse_coo_tensor(
        torch.zeros(1, 0, dtype=torch.int64), torch.zeros(0), (2,), check_invariants=False
    )
    with pytest.raises(RuntimeError, match="only supports dense tensors"):
        validation.check_dense("gather", [ONE, sparse])
    with pytest.raises(RuntimeError, match="invalid tensor layout at index 1"):
        validation.check_same_layout("allreduce", [ONE, sparse])
    with pytest.raises(RuntimeError, match="unsupported device type meta"):
        validation.check_device("allreduce", [ONE.to("meta")])


def test_gathered_size() -> None:
    validation.check_gathered_numel("all_gather", torch.ones(2, 2), ONE, 2)
    with pytest.raises(RuntimeError, match="invalid tensor size"):
        validation.check_gathered_numel("all_gather", TWO, ONE, 2)
    with pytest.raises(RuntimeError, match="invalid tensor type"):
        validation.check_gathered_numel("all_gather", torch.ones(4).double(), ONE, 2)


def test_row_splits_count_elements() -> None:
    rows = torch.ones(4, 3)
    assert validation.row_splits("a2a", "input", [], rows, 2) == [6, 6]
    assert validation.row_splits("a2a", "input", [1, 3], rows, 2) == [3, 9]
    assert validation.row_splits("a2a", "input", [0, 0], torch.ones(0, 3), 2) == [0, 0]
    assert validation.row_splits("a2a", "input", [], torch.ones(0), 2) == [0, 0]


@pytest.mark.parametrize(
    ("splits", "words"),
    [
        ([1, 2], r"Split sizes doesn't match total dim 0 size.*add up to 3, but input has 4 rows"),
        ([4], "Number of tensor splits not equal to group size"),
        ([5, -1], "must not be negative"),
    ],
)
def test_bad_row_splits(splits: list[int], words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        validation.row_splits("a2a", "input", splits, torch.ones(4, 3), 2)


@pytest.mark.parametrize("given", [(1, 2), np.array([1, 2]), [np.int32(1), torch.tensor(2)]])
def test_integers_of_any_type(given: Any) -> None:
    integers = validation.integers("splits", given)
    assert [*map(type, integers)] == [int, int]
    assert integers == [1, 2]


@pytest.mark.parametrize("given", [[1.0], "1", None, [None]])
def test_no_integers(given: Any) -> None:
    with pytest.raises(TypeError, match="splits must be integers"):
        validation.integers("splits", given)
    with pytest.raises(TypeError, match="the tag must be an integer"):
        validation.integer("the tag", given)


def test_equal_shares_must_exist() -> None:
    with pytest.raises(
        RuntimeError, match="Tensor's dim 0 does not divide equally across group size"
    ):
        validation.row_splits("a2a", "input", [], torch.ones(3), 2)
