"""CPU kernels over a batch: moments, normalisation, gradient sums, input gradient.

torch has no fused kernels for CPU that take moments from outside. But two kernels can be put to
that use, being up to ten times faster than what one would write first (torch.var_mean): the eval
mode of batch norm (`_Affine`), and the reduction of its backward, which sums up a batch about any
centre (`_kernel_sums`). Where a pass needs several operations, it goes over the batch block by
block: the batch comes from memory once, and the rest happens in the cache.

Measured and rejected: letting the kernel that sums up also scale dy, so that the second pass of
backward only corrects that. It saves a tenth of the time while memory is idle, nothing when other
ranks use it, and has to hold half types in float32 between the passes.

[Note: cancellation] A mean far larger than the deviation costs float32 its digits, depending on the
order of operations:

    x * scale - mean * scale        the terms cancel; but one fused operation does it
    (x - mean) * scale              exact where it matters
    sum(x * (x - origin))           likewise cancels, and needs x once
    sum((x - m)^2), m = sum(x)/n    exact, after correction for m's rounding, but needs x twice

So the moments decide: the fast way if each channel's mean is within a few deviations of 0, else the
exact way. What rounding a mean to float32 leaves over is accounted for in float64 in both.

[Note: folding] The reduction kernel adds up in float32, one value after the other if channels are
innermost: at a million values it is wrong in the fourth digit (so are the statistics of torch's
batch norm for channels-last). It costs nothing to show it the batch as one of more channels with
fewer values each, and to add up those channels' sums in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from impl.sync_batchnorm.moments import Moments, compute_dtype, merge, round_mean

# In float32, a block each of input, gradient and output fit into a cache of 2 MiB.
_BLOCK_NUMEL = 3 * 2**16

# Up to 4 deviations, cancellation costs at most 2 of the 24 bits of a float32.
_NEAR_ZERO_DEVIATIONS = 4.0

# How many values the reduction kernel may add up in float32: neighbours, where it uses many
# accumulators; and one after the other, where it has one for each channel.
_ROW_NUMEL_MAX = 4096
_COLUMN_NUMEL = 256


def local_moments(x: Tensor) -> Moments:
    moments = _moments_in_one_read(x)
    near_zero = _is_near_zero(moments.mean, moments.variance())
    return moments if near_zero else _moments_of_deviations(x)


def normalise(x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    affine = _Affine.of(x, mean, invstd, invstd * weight, bias)
    out = torch.empty_like(x)
    if affine.centre is None:
        return affine(x, out)
    for block, target in _blocks(x, out):
        work = _workspace(target)
        affine(block.to(work.dtype), work)
        if work is not target:
            target.copy_(work)
    return out


def gradient_sums(dy: Tensor, x: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    centre, rest = round_mean(mean, x.dtype)
    total, product = _sums(dy, x, centre)
    return total, product - rest * total


def input_gradient(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor,
    mean_dy: Tensor,
    mean_product: Tensor,
) -> Tensor:
    scale = invstd * weight
    affine = _Affine.of(x, mean, invstd, -scale * invstd.square() * mean_product, -scale * mean_dy)
    scale = _per_channel(scale, x)
    out = torch.empty_like(x)
    for block, g, target in _blocks(x, dy, out):
        work = _workspace(target)
        affine(block.to(work.dtype), work).addcmul_(g.to(work.dtype), scale)
        if work is not target:
            target.copy_(work)
    return out


@dataclass(frozen=True)
class _Affine:
    """(x - mean) * scale + shift, in the way that [Note: cancellation] asks for."""

    centre: Tensor | None  # None: fused
    scale: Tensor
    shift: Tensor

    @staticmethod
    def of(x: Tensor, mean: Tensor, invstd: Tensor, scale: Tensor, shift: Tensor) -> _Affine:
        """All given as float64 vectors."""
        if _is_near_zero(mean, invstd.pow(-2)):
            dtype = compute_dtype(x.dtype)
            return _Affine(None, scale.to(dtype), (shift - mean * scale).to(dtype))
        centre, rest = round_mean(mean, x.dtype)
        shift = shift - rest * scale
        return _Affine(_per_channel(centre, x), _per_channel(scale, x), _per_channel(shift, x))

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        """The result, in out. Both are of the compute type; if fused, also both of a half type."""
        if self.centre is not None:
            return torch.sub(x, self.centre, out=out).mul_(self.scale).add_(self.shift)
        # Eval mode, told that mean is 0 and variance 1. It has no statistics to save.
        zero, one = torch.zeros_like(self.scale), torch.ones_like(self.scale)
        unused = torch.empty_like(zero), torch.empty_like(zero)
        torch.native_batch_norm(
            x, self.scale, self.shift, zero, one, False, 0.0, 0.0, out=(out, *unused)
        )
        return out


def _moments_in_one_read(x: Tensor) -> Moments:
    """Moments, exact enough only for means near 0.

    The mean of the first sample serves as origin: like the mean of all, give or take a deviation.
    """
    count = x.new_full((1,), x.numel() // x.size(1), dtype=torch.float64)
    origin = _means(x[:1].to(compute_dtype(x.dtype)))
    total, product = _sums(x, x, origin)
    mean = total / count
    return Moments(count, mean, (product - (mean - origin) * total).clamp(min=0))


def _moments_of_deviations(x: Tensor) -> Moments:
    """Moments of any batch."""
    parts = []
    for (block,) in _blocks(x):
        block = block.to(compute_dtype(x.dtype))
        guess = _means(block)
        deviations = block - _per_channel(guess, x)
        missed, square = _sums(deviations, deviations, torch.zeros_like(guess))
        count = missed.new_full((1,), block.numel() // block.size(1))
        m2 = (square - missed.square() / count).clamp(min=0)
        parts.append(Moments(count, guess + missed / count, m2).pack())
    return merge(Moments.unpack(torch.stack(parts)))


def _means(x: Tensor) -> Tensor:
    """Every channel's mean, in x's type, as exact as that allows."""
    return x.mean([dim for dim in range(x.dim()) if dim != 1])


def _is_near_zero(mean: Tensor, variance: Tensor) -> bool:
    """Whether no channel's mean is far from 0: see [Note: cancellation]."""
    return bool((mean.square() <= _NEAR_ZERO_DEVIATIONS**2 * variance).all())


def _sums(dy: Tensor, x: Tensor, centre: Tensor) -> tuple[Tensor, Tensor]:
    """sum(dy) and sum(dy * (x - centre)) of every channel, in float64: see [Note: folding].

    centre has the batch's compute type, in which the kernel also adds up batches of a half type.
    """
    channels, row_numel = x.size(1), x[0, 0].numel()
    if row_numel > 1 and x.is_contiguous():
        # A power of two, because most sizes are multiples of one.
        folds = math.gcd(row_numel, 2 ** (row_numel // _ROW_NUMEL_MAX).bit_length())
        if folds == 1:
            total, product = _kernel_sums(dy, x, centre)
            return total, product
        shape = (x.size(0), channels * folds, row_numel // folds)
        sums = _kernel_sums(dy.view(shape), x.view(shape), centre.repeat_interleave(folds))
        total, product = sums.view(2, channels, folds).sum(dim=2)
        return total, product

    # Channels are innermost: (values, C). Fold as many values as go evenly, then the remainder.
    dy, x = (batch.movedim(1, -1).reshape(-1, channels) for batch in (dy, x))
    folds = max(1, len(x) // _COLUMN_NUMEL)
    even = len(x) - len(x) % folds
    sums = _kernel_sums(
        dy[:even].view(-1, folds * channels),
        x[:even].view(-1, folds * channels),
        centre.repeat(folds),
    )
    sums = sums.view(2, folds, channels).sum(dim=1)
    if even < len(x):
        sums += _kernel_sums(dy[even:], x[even:], centre)
    total, product = sums
    return total, product


def _kernel_sums(dy: Tensor, x: Tensor, centre: Tensor) -> Tensor:
    """sum(dy) and sum(dy * (x - centre)) as (2, C), in float64, added up by one kernel call.

    They are the gradients of bias and weight in batch norm's backward, if invstd is 1.
    """
    one = torch.ones_like(centre)
    _, product, total = torch.ops.aten.native_batch_norm_backward(
        dy, x, None, None, None, centre, one, True, 0.0, [False, True, True]
    )
    return torch.stack([total, product]).double()


def _workspace(target: Tensor) -> Tensor:
    """Where to compute what goes to target: there, or in a wider type for a half type."""
    dtype = compute_dtype(target.dtype)
    return target if target.dtype == dtype else torch.empty_like(target, dtype=dtype)


def _blocks(*batches: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Batches of one shape, cut along dimension 0 to the size of a block, or to single samples."""
    samples = max(1, _BLOCK_NUMEL // batches[0][0].numel())
    return zip(*(batch.split(samples) for batch in batches), strict=True)


def _per_channel(vector: Tensor, x: Tensor) -> Tensor:
    """A vector of C numbers in x's compute type, shaped to broadcast against x."""
    return vector.to(compute_dtype(x.dtype)).view(-1, *[1] * (x.dim() - 2))
