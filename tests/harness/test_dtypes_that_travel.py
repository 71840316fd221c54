"""Tensors of every dtype go to a rank and come back as they were."""

from __future__ import annotations

import math

import pytest
import torch

from conformance.capabilities import DTYPES
from conformance.harness.messages import pack, unpack


def different_values(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """0, 1, 2 and so on, which every dtype but bool tells apart."""
    return torch.arange(numel).to(torch.float32).to(dtype)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 2), (3, 2)], ids=str)
def test_a_tensor_of_any_dtype_travels_by_value(name: str, shape: tuple[int, ...]) -> None:
    dtype = getattr(torch, name)
    filled = different_values(math.prod(shape), dtype).view(shape)
    sent = filled.mT if len(shape) == 2 else filled
    [got] = unpack(pack([sent]))
    assert got.dtype is dtype
    assert got.shape == sent.shape
    assert torch.equal(got.to(torch.complex128), sent.to(torch.complex128))


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("numel", [0, 1, 3])
def test_a_view_with_gaps_travels(name: str, numel: int) -> None:
    dtype = getattr(torch, name)
    sent = different_values(9, dtype).as_strided((numel,), (3,))
    [got] = unpack(pack([sent]))
    assert torch.equal(got.to(torch.complex128), sent.to(torch.complex128))
