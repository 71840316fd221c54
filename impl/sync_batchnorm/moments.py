"""Count, mean and variance of each rank's batch, and how they are merged over all ranks.

[Note: moments] A batch is summed up, channel by channel, as (count, mean, M2), M2 being the sum of
squared deviations from the mean. Two such triples merge without cancellation (Chan, Golub and
LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979). The
tempting alternative, one all_reduce of sum(x) and sum(x^2), subtracts two nearly equal numbers when
the mean is large: at mean 1e4 and variance 1, float32 has no digit of the variance left. Sending
invstd, as torch does, means to take epsilon off again, which loses a variance far below epsilon.

All of this is in float64, whatever the type of the batch. These are a few numbers a channel, so it
costs nothing next to the batch; merging then adds no rounding that float32 could show, and a count
is exact past 2^24, where float32 stops counting.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Moments:
    """Moments of one batch (without R), or of R batches; float64."""

    count: Tensor  # (1,) or (R, 1); values per channel, 0 for an empty batch
    mean: Tensor  # (C,) or (R, C); 0 for an empty batch
    m2: Tensor  # (C,) or (R, C); 0 for an empty batch

    def pack(self) -> Tensor:
        """One batch's moments as a message, (2C + 1,)."""
        return torch.cat([self.mean, self.m2, self.count])

    @staticmethod
    def unpack(messages: Tensor) -> Moments:
        """Messages of R batches, (R, 2C + 1), as their moments."""
        channels = messages.size(1) // 2
        mean, m2, count = messages.split([channels, channels, 1], dim=1)
        return Moments(count, mean, m2)

    def variance(self) -> Tensor:
        """The biased variance, which normalises a batch; 0 where the count is 0."""
        return self.m2 / self.count.clamp(min=1)

    def unbiased_variance(self) -> Tensor:
        """The unbiased variance, which running statistics track; 0 where the count is below 2."""
        return self.m2 / (self.count - 1).clamp(min=1)


def empty_moments(x: Tensor) -> Moments:
    """Moments of a batch (N, C, *) that has no values."""
    zero = x.new_zeros(x.size(1), dtype=torch.float64)
    return Moments(zero[:1], zero, zero)


def merge(parts: Moments) -> Moments:
    """Moments of R batches as one batch; any or all of them may be empty.

    Means are taken relative to the mean of the largest batch: nearby numbers subtract without
    rounding, so what differs between batches survives however large their means are.

        batches [0, 2] and [10]    counts 2, 1    means 1, 10    M2 2, 0
        origin 1, offsets 0, 9     offset of the whole: (2 * 0 + 1 * 9) / 3 = 3
        mean 1 + 3 = 4             M2 (2 + 0) + 2 * (0 - 3)^2 + 1 * (9 - 3)^2 = 56
    """
    total = parts.count.sum(dim=0)
    origin = parts.mean.index_select(0, parts.count.argmax(dim=0))  # (1, C)
    offsets = parts.mean - origin
    # An empty batch has an arbitrary offset, and a weight of 0.
    offset = (parts.count * offsets).sum(dim=0) / total.clamp(min=1)
    spread = (parts.count * (offsets - offset).square()).sum(dim=0)
    return Moments(total, origin[0] + offset, parts.m2.sum(dim=0) + spread)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a batch is computed in: float32, which sums of half types need, or float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def round_mean(mean: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A float64 mean as a batch's compute type can hold it, and what is left over, in float64."""
    centre = mean.to(compute_dtype(dtype))
    return centre, mean - centre
