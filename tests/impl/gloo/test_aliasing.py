"""Outputs that share memory are refused, and others are not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from impl.gloo.memory import aliasing

BASE = torch.arange(24.0).view(4, 6)


@pytest.mark.parametrize(
    "outputs",
    [
        [BASE, BASE],
        [BASE[0], BASE[0]],
        [BASE.view(-1)[0:4], BASE.view(-1)[3:6]],
        [BASE[:, 1], BASE[:, 1]],
        [torch.zeros(1).expand(4)],
        [torch.zeros(2, 1).expand(2, 3), torch.zeros(2, 3)],
    ],
    ids=["same", "same row", "overlapping", "same column", "expanded", "expanded first"],
)
def test_outputs_that_share_memory_are_refused(outputs: list[Tensor]) -> None:
    with pytest.raises(RuntimeError, match=r"shares memory|single memory location"):
        aliasing.check_writable("all_gather", outputs)


@pytest.mark.parametrize(
    "outputs",
    [
        [BASE],
        list(BASE),
        [BASE[:, column] for column in range(6)],
        list(BASE.view(-1).split(5)),
        [torch.empty(0), torch.empty(0)],
        [BASE.t()],
    ],
    ids=["one", "rows", "columns", "uneven pieces", "empty", "transposed"],
)
def test_outputs_of_their_own_are_accepted(outputs: list[Tensor]) -> None:
    aliasing.check_writable("all_gather", outputs)
