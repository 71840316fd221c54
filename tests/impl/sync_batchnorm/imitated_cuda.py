"""CUDA's batch norm kernels, imitated on CPU: what they compute, and which types they insist on.

After aten/src/ATen/native/cuda/Normalization.cu. They check the arithmetic of passes_cuda where
there is no CUDA device; they say nothing about the kernels themselves.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from impl.sync_batchnorm import passes_cuda
from impl.sync_batchnorm.moments import compute_dtype
from impl.sync_batchnorm.passes import Passes

passes: Passes = passes_cuda


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the end of a test, torch's functions are the imitations."""
    for function in (
        batch_norm_update_stats,
        batch_norm_elemt,
        batch_norm_backward_reduce,
        batch_norm_backward_elemt,
    ):
        monkeypatch.setattr(torch, function.__name__, function)


def batch_norm_update_stats(
    x: Tensor, running_mean: None, running_var: None, momentum: float
) -> tuple[Tensor, Tensor]:
    dims = [dim for dim in range(x.dim()) if dim != 1]
    dtype = compute_dtype(x.dtype)
    return x.double().mean(dims).to(dtype), x.double().var(dims, correction=0).to(dtype)


def batch_norm_elemt(
    x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, invstd: Tensor, eps: float
) -> Tensor:
    _check(x, weight, bias, mean, invstd)
    weight, bias, mean, invstd = _columns(x, weight, bias, mean, invstd)
    return ((x - mean) * invstd * weight + bias).to(x.dtype)


def batch_norm_backward_reduce(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[Tensor, Tensor, None, None]:
    _check(x, weight, mean, invstd)
    assert dy.stride() == x.stride()
    assert (input_g, weight_g, bias_g) == (True, False, False)
    dims = [dim for dim in range(x.dim()) if dim != 1]
    (centre,) = _columns(x, mean)
    product = dy.double() * (x.double() - centre.double())
    total, product = (  # rounded to the batch's type, as seen with torch 2.11 on an H200
        each.sum(dims).to(x.dtype).to(mean.dtype) for each in (dy.double(), product)
    )
    return total, product, None, None


def batch_norm_backward_elemt(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    count: Tensor,
) -> Tensor:
    _check(x, mean, invstd, weight, sum_dy, sum_dy_xmu)
    assert count.dtype == torch.int32
    assert dy.stride() == x.stride()
    total = count.sum()
    mean, invstd, weight, mean_dy, mean_product = _columns(
        x, mean, invstd, weight, sum_dy / total, sum_dy_xmu / total
    )
    slope = mean_product * invstd * invstd
    return ((dy - mean_dy - (x - mean) * slope) * invstd * weight).to(x.dtype)


def _check(x: Tensor, *vectors: Tensor) -> None:
    for vector in vectors:
        assert vector.dtype == compute_dtype(x.dtype)
        assert vector.shape == (x.size(1),)


def _columns(x: Tensor, *vectors: Tensor) -> list[Tensor]:
    return [vector.view(-1, *[1] * (x.dim() - 2)) for vector in vectors]
