"""Tensors of every dtype go to a rank and come back as they were."""

from __future__ import annotations

import pytest
import torch

from conformance.capabilities import DTYPES
from conformance.harness.messages import pack, unpack


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 2), (3, 2)], ids=str)
def test_a_tensor_of_any_dtype_travels_by_value(name: str, shape: tuple[int, ...]) -> None:
    dtype = getattr(torch, name)
    sent = torch.ones(shape).to(dtype).mT if len(shape) == 2 else torch.ones(shape).to(dtype)
    [got] = unpack(pack([sent]))
    assert got.dtype is dtype
    assert got.shape == sent.shape
    assert torch.equal(got.to(torch.complex128), sent.to(torch.complex128))


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("numel", [0, 1, 3])
def test_a_view_with_gaps_travels(name: str, numel: int) -> None:
    dtype = getattr(torch, name)
    sent = torch.ones(9).to(dtype).as_strided((numel,), (3,))
    [got] = unpack(pack([sent]))
    assert torch.equal(got.to(torch.complex128), sent.to(torch.complex128))
