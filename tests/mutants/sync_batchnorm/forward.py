"""Mutants of conformance/spec/sync_batchnorm/forward.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from conformance.verdict import Verdict
from impl.sync_batchnorm import SyncBatchNorm, module, normalise, passes_cpu
from impl.sync_batchnorm.moments import Moments, merge
from impl.sync_batchnorm.normalise import Exchange, GroupExchange
from tests.mutants.kit import Patch, breaks
from tests.mutants.sync_batchnorm.kit import ExchangeMutant, Wrong
from tests.mutants.wrappers import LayerMutant


class _AlikeCounts(Wrong):
    def all_gather(self, message: Tensor) -> Tensor:
        messages = super().all_gather(message)
        messages[:, -1] = messages[:, -1].mean()
        return messages


@breaks("sync_batchnorm/unequal-batches", says=r"output: rank \d is wrong")
class CountsAllRanksAlike(ExchangeMutant):
    """The mean is that of the ranks' means, and so is the variance."""

    exchange = _AlikeCounts


@dataclass(frozen=True)
class _RoundedCounts(Wrong):
    counts_in: torch.dtype

    def all_gather(self, message: Tensor) -> Tensor:
        messages = super().all_gather(message)
        messages[:, -1] = messages[:, -1].to(self.counts_in)
        return messages


@breaks("sync_batchnorm/half-counts", says=r"running_mean: rank 0 is wrong|output: rank 0 is wrong")
class CountsInTheInputsType(LayerMutant, SyncBatchNorm):
    """Ranks exchange their numbers of values in the dtype of the input."""

    def forward(self, input: Tensor) -> Tensor:
        self.counts_in = input.dtype
        return super().forward(input)

    def _exchange(self) -> Exchange | None:
        right = super()._exchange()
        if not isinstance(right, GroupExchange):
            return right
        return _RoundedCounts(right.group, right.world_size, self.counts_in)


class _OneNanForAll(Wrong):
    def all_gather(self, message: Tensor) -> Tensor:
        messages = super().all_gather(message)
        return messages * 0 + messages.isnan().any() * torch.nan + messages.nan_to_num()


@breaks("sync_batchnorm/channels-apart", says=r"output: rank \d is wrong")
class SpreadsNaN(ExchangeMutant):
    """A NaN in one channel makes all channels NaN."""

    exchange = _OneNanForAll


@breaks("sync_batchnorm/empty-on-some-ranks", says=r"all_gather #\d", verdict=Verdict.TIMEOUT)
class RanksWithEmptyBatchesDoNotTakePart(LayerMutant, SyncBatchNorm):
    """A rank without values returns at once, and the others wait."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) if input.numel() else input * 1


@breaks("sync_batchnorm/one-value-a-rank", says=r"Expected more than 1 value")
class WantsTwoValuesOnEachRank(LayerMutant, SyncBatchNorm):
    """The rule about one value per channel is applied to a rank's own batch."""

    def forward(self, input: Tensor) -> Tensor:
        if self.training and input.numel() == input.size(1):
            raise ValueError("Expected more than 1 value per channel when training")
        return super().forward(input)


@breaks("sync_batchnorm/dimensions", says=r"expected 2D, 3D or 4D input")
class RefusesFiveDimensions(LayerMutant, SyncBatchNorm):
    """An input of five dimensions is refused."""

    def forward(self, input: Tensor) -> Tensor:
        if input.dim() > 4:
            raise ValueError("expected 2D, 3D or 4D input")
        return super().forward(input)


@breaks("sync_batchnorm/empty-on-all-ranks", says=r"no values to normalise")
class RefusesEmptyBatches(LayerMutant, SyncBatchNorm):
    """An empty batch is refused."""

    def forward(self, input: Tensor) -> Tensor:
        if not input.numel():
            raise ValueError("no values to normalise")
        return super().forward(input)


@breaks("sync_batchnorm/channels-last", says=r"(?i)channels.last")
class ReturnsContiguous(LayerMutant, SyncBatchNorm):
    """The output is contiguous, whatever the input was."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).contiguous()


@breaks("sync_batchnorm/non-contiguous", says=r"output: rank \d is wrong|bounds")
class ReadsInMemoryOrder(LayerMutant, SyncBatchNorm):
    """The input is read as if it were contiguous."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.as_strided(input.shape, torch.empty(input.shape).stride()))


@breaks("sync_batchnorm/half-does-not-overflow", says=r"rank \d is wrong[\s\S]*got nan")
class AddsUpInHalf(LayerMutant, SyncBatchNorm):
    """Sums over the batch are computed in the batch's dtype."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 0 * input.detach().square().sum()


@breaks("sync_batchnorm/autocast", says=r"got 'torch.bfloat16', want 'torch.float32'")
class FollowsAutocast(LayerMutant, SyncBatchNorm):
    """The output has autocast's dtype."""

    def forward(self, input: Tensor) -> Tensor:
        y = super().forward(input)
        return y.to(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else y


@breaks("sync_batchnorm/output", says=r"output: rank \d is wrong")
class NormalisesAlone(LayerMutant, SyncBatchNorm):
    """Each rank's batch is normalised by itself."""

    def _exchange(self) -> Exchange | None:
        return None


@breaks("sync_batchnorm/not-affine", says=r"output: rank \d is wrong")
class MissingWeightIsZero(LayerMutant, SyncBatchNorm):
    """Without a weight the output is zero."""

    def forward(self, input: Tensor) -> Tensor:
        y = super().forward(input)
        return y if self.affine else y * 0


@breaks("sync_batchnorm/no-bias", says=r"bias|is wrong")
class AlwaysHasABias(LayerMutant, SyncBatchNorm):
    """bias=False is ignored."""

    def __init__(self, *args: Any, bias: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.affine and not bias:
            nn.init.ones_(self.bias)


@breaks("sync_batchnorm/variance-between-ranks", says=r"output: rank \d is wrong")
class OmitsTheSpreadBetweenRanks(Patch):
    """The variance is the mean of the ranks' variances."""

    base = "impl"

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        def merge_wrongly(parts: Moments) -> Moments:
            merged = merge(parts)
            return Moments(merged.count, merged.mean, parts.m2.sum(dim=0))

        with mock.patch.object(normalise, "merge", merge_wrongly):
            yield


@breaks("sync_batchnorm/large-mean", says=r": rank \d is wrong")
class SubtractsSquares(Patch):
    """The variance is the mean of squares less the square of the mean, in float32."""

    base = "impl"

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        def local_moments(x: Tensor) -> Moments:
            dims = [dim for dim in range(x.dim()) if dim != 1]
            count = torch.tensor([float(x.numel() // x.size(1))], dtype=torch.float64)
            mean = x.float().mean(dims)
            m2 = (x.float().square().sum(dims) - float(count) * mean.square()).clamp(min=0)
            return Moments(count, mean.double(), m2.double())

        with mock.patch.object(passes_cpu, "local_moments", local_moments):
            yield


@breaks("sync_batchnorm/eps", says=r"output: rank \d is wrong")
class AddsEpsilonForEachRank(Patch):
    """eps is added once per rank."""

    base = "impl"

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        right = normalise.normalise

        def wrong(x: Tensor, w: Any, b: Any, moments: Moments, eps: float, exchange: Any) -> Tensor:
            return right(x, w, b, moments, eps * exchange.world_size, exchange)

        with mock.patch.object(module, "normalise", wrong):
            yield


@breaks("sync_batchnorm/half-input", says=r"output: rank \d is wrong\s+got float32")
class ReturnsWhatItComputesIn(LayerMutant, SyncBatchNorm):
    """The output of a float16 or bfloat16 batch has dtype float32."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).float()


@breaks("sync_batchnorm/half-model", says=r"(?i)dtype|same type|Half")
class KeepsStatisticsInFloat32(LayerMutant, SyncBatchNorm):
    """Statistics of a half model meet those of a batch in float32."""

    def forward(self, input: Tensor) -> Tensor:
        if self.training and self.running_mean is not None:
            self.running_mean.lerp_(torch.zeros(self.num_features), 0.0)
        return super().forward(input)


class _FourRanks(Wrong):
    def all_gather(self, message: Tensor) -> Tensor:
        return super().all_gather(message)[:4]


@breaks("sync_batchnorm/unequal-batches", says=r"output: rank \d is wrong")
class MergesFourRanksAtMost(ExchangeMutant):
    """The batches of the fifth rank and of those behind it are left out of the statistics."""

    exchange = _FourRanks
