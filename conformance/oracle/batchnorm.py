"""Expected results of SyncBatchNorm, with error bounds: batch norm of all ranks' batches at once.

[Note: how far off]
Let eps be the distance from 1 to the next number in the type that a batch is computed in: float64
for float64, and float32 for all others. Rounding moves the mean by about eps times the largest
|x|; in deviations, by eps times the *offset*, max |x| / deviation. It moves a normalised value by
that and by eps times its own size. What is computed from these is then off by no more than a few
times as much, and by the rounding to the type of the result. Batches are small here, so "a few" is
a constant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from conformance.oracle.near import Near, epsilon

_ROUNDINGS = 32


@dataclass(frozen=True, slots=True)
class Moments:
    """Mean and unbiased variance of the whole batch, and how far off they may be; float64, (C,)."""

    mean: Tensor
    mean_within: Tensor
    var: Tensor
    var_within: Tensor


@dataclass(frozen=True, slots=True)
class Expected:
    """One step of training, one value a rank.

    weight_grads, bias_grads: of the rank's own part of the loss; empty lists without a weight.
    moments: what the running statistics are to take in; None if the whole batch is empty.
    """

    outputs: list[Near]
    input_grads: list[Near]
    weight_grads: list[Near]
    bias_grads: list[Near]
    moments: Moments | None


def whole_batch(
    batches: Sequence[Tensor],
    output_grads: Sequence[Tensor],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Expected:
    """Forward and backward in training.

    batches: one per rank, (N, C, *); N may be 0 and may differ.
    output_grads: the gradients of the loss with respect to the outputs, of the same shapes.
    weight, bias: (C,).
    """
    dtype = batches[0].dtype
    x = torch.cat([batch.double() for batch in batches])
    dy = torch.cat([grad.double() for grad in output_grads])
    if x.numel() == 0:
        return _nothing(batches, weight, bias)
    sizes = [len(batch) for batch in batches]
    dims = [dim for dim in range(x.dim()) if dim != 1]
    factor = _columns(torch.ones(x.size(1)) if weight is None else weight, x)
    term = _columns(torch.zeros(x.size(1)) if bias is None else bias, x)

    x.requires_grad_()
    normalised = functional.batch_norm(x, None, None, training=True, eps=eps)
    y = normalised * factor + term
    (dx,) = torch.autograd.grad(y, x, dy)
    x, y, normalised = x.detach(), y.detach(), normalised.detach()

    values = x.numel() // x.size(1)
    var, mean = torch.var_mean(x, dims, correction=0)
    invstd = _columns((var + eps).rsqrt(), x)
    largest = x.abs().amax(dims, keepdim=True)
    offset = largest * invstd
    size = normalised.abs().amax(dims, keepdim=True)
    spread = (1 + size) * (1 + offset)
    steepest = dy.abs().amax(dims, keepdim=True)

    rounding = _ROUNDINGS * epsilon(torch.float64 if dtype == torch.float64 else torch.float32)
    y_within = rounding * (factor.abs() * spread + term.abs()) + _rounded(y, dtype)
    dx_within = rounding * invstd * factor.abs() * steepest * spread * (1 + size)
    dx_within = dx_within + _rounded(dx, dtype)

    weight_grads, bias_grads = [], []
    for g, n in zip(dy.split(sizes), normalised.split(sizes), strict=True):
        total = g.abs().sum(dims)
        if weight is not None:
            value = (g * n).sum(dims)
            within = rounding * total * spread.flatten() + _rounded(value, weight.dtype)
            weight_grads.append(Near(value, within, weight.dtype))
        if bias is not None:
            value = g.sum(dims)
            within = rounding * total + _rounded(value, bias.dtype)
            bias_grads.append(Near(value, within, bias.dtype))
    unbiased = values / (values - 1) if values > 1 else 0.0
    return Expected(
        outputs=_split(y, y_within, sizes, dtype),
        input_grads=_split(dx, dx_within, sizes, dtype),
        weight_grads=weight_grads,
        bias_grads=bias_grads,
        moments=Moments(
            mean,
            rounding * largest.flatten(),
            var * unbiased,
            rounding * (var + eps) * (1 + offset.flatten()) * unbiased,
        ),
    )


@dataclass(frozen=True, slots=True)
class Running:
    """Running statistics: what they are and how far off they may be; float64, (C,)."""

    mean: Tensor
    mean_within: Tensor
    var: Tensor
    var_within: Tensor
    batches: int = 0

    @staticmethod
    def fresh(channels: int) -> Running:
        """As a new layer has them."""
        zero = torch.zeros(channels, dtype=torch.float64)
        return Running(zero, zero, zero + 1, zero)

    def after(self, moments: Moments | None, momentum: float | None, dtype: torch.dtype) -> Running:
        """With one more batch taken in; momentum None is the plain average of all batches.

        moments: None for an empty batch, which is counted and changes nothing else.
        dtype: of the layer's buffers, to which they are rounded.
        """
        batches = self.batches + 1
        if moments is None:
            return Running(self.mean, self.mean_within, self.var, self.var_within, batches)
        share = 1 / batches if momentum is None else momentum
        mean = self.mean.lerp(moments.mean, share)
        var = self.var.lerp(moments.var, share)
        return Running(
            mean,
            self.mean_within.lerp(moments.mean_within, share) + _rounded(mean, dtype),
            var,
            self.var_within.lerp(moments.var_within, share) + _rounded(var, dtype),
            batches,
        )

    def near(self, dtype: torch.dtype) -> tuple[Near, Near]:
        """Mean and variance as tensors of this dtype."""
        return Near(self.mean, self.mean_within, dtype), Near(self.var, self.var_within, dtype)


def evaluated(
    batch: Tensor,
    mean: Tensor,
    var: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Near:
    """The output for one rank's batch with given statistics, as in eval mode."""
    x = batch.double()
    factor = _columns(torch.ones(x.size(1)) if weight is None else weight, x)
    term = _columns(torch.zeros(x.size(1)) if bias is None else bias, x)
    invstd = _columns((var.double() + eps).rsqrt(), x)
    centre = _columns(mean, x)
    y = (x - centre) * invstd * factor + term
    rounding = _ROUNDINGS * epsilon(torch.float64 if x.dtype == batch.dtype else torch.float32)
    size = ((x.abs() + centre.abs()) * invstd * factor).abs() + term.abs()
    return Near(y, rounding * size + _rounded(y, batch.dtype), batch.dtype)


def _nothing(batches: Sequence[Tensor], weight: Tensor | None, bias: Tensor | None) -> Expected:
    """All ranks' batches are empty: so is what they become, and the parameters have no gradient."""
    empty = [_exact(torch.zeros(batch.shape), batch.dtype) for batch in batches]

    def zeros(vector: Tensor | None) -> list[Near]:
        if vector is None:
            return []
        return [_exact(torch.zeros(vector.shape), vector.dtype)] * len(batches)

    return Expected(empty, empty, zeros(weight), zeros(bias), None)


def _exact(value: Tensor, dtype: torch.dtype) -> Near:
    return Near(value.double(), torch.zeros((), dtype=torch.float64), dtype)


def _split(value: Tensor, within: Tensor, sizes: list[int], dtype: torch.dtype) -> list[Near]:
    errors = within.expand_as(value).split(sizes)
    return [Near(v, w, dtype) for v, w in zip(value.split(sizes), errors, strict=True)]


def _rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The error of rounding to a dtype, twice over."""
    return value.abs() * epsilon(dtype) + torch.finfo(dtype).smallest_normal


def _columns(vector: Tensor, x: Tensor) -> Tensor:
    return vector.detach().double().view(-1, *[1] * (x.dim() - 2))
