"""Batch norm passes on CUDA by torch's fused kernels: moments, output, gradients.

The kernels want vectors in the batch's compute type. They subtract the mean first, so no digits
cancel; what rounding took from the mean is made up for in the other vectors. Nothing here makes the
host wait for the device. Semantics: aten/src/ATen/native/cuda/Normalization.cu.
"""

from __future__ import annotations

import torch
from torch import Tensor

from impl.sync_batchnorm.moments import Moments, round_mean


def local_moments(x: Tensor) -> Moments:
    # Without running statistics to update, this kernel returns mean and biased variance, no more.
    mean, variance = torch.batch_norm_update_stats(x, None, None, 0.0)
    count = x.new_full((1,), x.numel() // x.size(1), dtype=torch.float64)
    return Moments(count, mean.double(), variance.double() * count)


def normalise(x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    centre, rest = round_mean(mean, x.dtype)
    scale = invstd * weight
    shift = bias - rest * scale
    scale, shift = scale.to(centre.dtype), shift.to(centre.dtype)
    # invstd is in scale already; the kernel ignores epsilon.
    return torch.batch_norm_elemt(x, scale, shift, centre, torch.ones_like(scale), 0.0)


def gradient_sums(dy: Tensor, x: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    centre, rest = round_mean(mean, x.dtype)
    # Before torch 2.15 the kernel takes products and partial sums through half types of its input.
    dy, x = dy.to(centre.dtype), x.to(centre.dtype)
    one = torch.ones_like(centre)  # for invstd and weight, which do not enter these two sums
    total, product, _, _ = torch.batch_norm_backward_reduce(
        dy, x, centre, one, one, True, False, False
    )
    total = total.double()
    return total, product.double() - rest * total


def input_gradient(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor,
    mean_dy: Tensor,
    mean_product: Tensor,
) -> Tensor:
    centre, rest = round_mean(mean, x.dtype)
    slope = invstd.square() * mean_product
    vectors = (invstd * weight, slope, mean_dy - rest * slope)
    scale, slope, mean_dy = (vector.to(centre.dtype) for vector in vectors)
    # The kernel divides sums by a count and multiplies by invstd; both are in the vectors already.
    one, count = torch.ones_like(scale), torch.ones(1, dtype=torch.int32, device=x.device)
    return torch.batch_norm_backward_elemt(dy, x, centre, one, scale, mean_dy, slope, count)
