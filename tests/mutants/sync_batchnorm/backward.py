"""SyncBatchNorm that computes something else, forward or backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from impl.sync_batchnorm import SyncBatchNorm, module, normalise, passes_cpu
from impl.sync_batchnorm.moments import Moments, merge
from tests.mutants.kit import Patch, breaks
from tests.mutants.wrappers import LayerFault

_Normalise: Any = normalise._Normalise
Gradients = tuple[Any, ...]  # of input, weight and bias, and of what has none


@contextmanager
def backward_as(change: Callable[[Any, Gradients], Gradients]) -> Iterator[None]:
    """While this lasts, the layer's gradients are what `change` makes of the right ones."""
    right = _Normalise.backward

    def backward(ctx: Any, grad_output: Tensor) -> Gradients:
        return change(ctx, right(ctx, grad_output))

    with mock.patch.object(_Normalise, "backward", staticmethod(backward)):
        yield


@breaks("sync_batchnorm/variance-between-ranks", says=r"output: rank \d is wrong")
class OmitsTheSpreadBetweenRanks(Patch):
    """The variance of all is the mean of the ranks' variances."""

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
    """Two ranks, twice epsilon."""

    base = "impl"

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        right = normalise.normalise

        def wrong(x: Tensor, w: Any, b: Any, moments: Moments, eps: float, exchange: Any) -> Tensor:
            return right(x, w, b, moments, eps * exchange.world_size, exchange)

        with mock.patch.object(module, "normalise", wrong):
            yield


@breaks("sync_batchnorm/running-statistics", says=r"running_var.*: rank \d is wrong")
class TracksTheBiasedVariance(Patch):
    """running_var moves towards the variance that normalises."""

    base = "impl"

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        with mock.patch.object(Moments, "unbiased_variance", Moments.variance):
            yield


@breaks("sync_batchnorm/empty-statistics", says=r"an empty batch moved running_mean")
class NothingMovesStatistics(Patch):
    """A batch without values counts as one of zeros."""

    base = "impl"

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        def update(running: Tensor | None, observed: Tensor, factor: float, count: Tensor) -> None:
            if running is not None:
                running.copy_(running.double().lerp(observed, factor))

        with mock.patch.object(module, "_update_running", update):
            yield


@breaks("sync_batchnorm/more-than-one-value", says=r"was to raise ValueError, and it returned")
class TrainsOnOneValue(Patch):
    """The variance of one value is taken for zero."""

    base = "impl"

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        with mock.patch.object(module, "_check_more_than_one_value"):
            yield


@breaks("sync_batchnorm/parameter-gradients", says=r"gradient of weight: rank \d is wrong")
class AddsUpParameterGradients(Patch):
    """Gradients of the weight are summed over the ranks, and DDP averages that again."""

    base = "impl"

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        def change(ctx: Any, grads: Gradients) -> Gradients:
            if grads[1] is not None:
                dist.all_reduce(grads[1])
            return grads

        with backward_as(change):
            yield


@breaks("sync_batchnorm/empty-gradients", says=r"gradient of the input: rank \d[\s\S]*got None")
class NothingHasNoGradient(Patch):
    """The input's gradient is None where the batch is empty."""

    base = "impl"

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        def change(ctx: Any, grads: Gradients) -> Gradients:
            is_empty = grads[0] is not None and grads[0].numel() == 0
            return (None, *grads[1:]) if is_empty else grads

        with backward_as(change):
            yield


@breaks("sync_batchnorm/empty-under-ddp", says=r"not finite after step 1: .*weight")
class DividesByNothing(Patch):
    """The weight's gradient is not a number where the batch is empty."""

    base = "impl"

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        def change(ctx: Any, grads: Gradients) -> Gradients:
            is_empty = grads[0] is not None and grads[0].numel() == 0
            return (grads[0], grads[1] * torch.nan, *grads[2:]) if is_empty else grads

        with backward_as(change):
            yield


@breaks("sync_batchnorm/silent-backward", says=r"operations of backward: rank \d is wrong")
class ExchangesForNobody(Patch):
    """Backward exchanges sums although no rank's input requires a gradient."""

    base = "impl"

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        def change(ctx: Any, grads: Gradients) -> Gradients:
            if grads[0] is None:
                ctx.exchange.all_reduce(torch.zeros(1))
            return grads

        with backward_as(change):
            yield


@breaks("sync_batchnorm/transposed-neighbours", says=r"gradient of .*: rank \d is wrong")
class ReadsGradientsInMemoryOrder(Patch):
    """Takes the gradient that comes in for contiguous."""

    base = "impl"

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        right = _Normalise.backward

        def backward(ctx: Any, dy: Tensor) -> Gradients:
            contiguous = torch.empty(dy.shape).stride()
            grads: Gradients = right(ctx, dy.as_strided(dy.shape, contiguous))
            return grads

        with mock.patch.object(_Normalise, "backward", staticmethod(backward)):
            yield


@breaks(
    "sync_batchnorm/bias-changed-before-backward", says="the bias has been modified by an inplace"
)
class SavesTheBias(Patch):
    """Backward insists on the bias that forward has seen."""

    base = "impl"

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        right_forward, right_backward = _Normalise.forward, _Normalise.backward

        def forward(ctx: Any, x: Tensor, weight: Any, bias: Any, *others: Any) -> Tensor:
            ctx.saved_bias = (bias, None if bias is None else bias._version)
            out: Tensor = right_forward(ctx, x, weight, bias, *others)
            return out

        def backward(ctx: Any, dy: Tensor) -> Gradients:
            bias, version = ctx.saved_bias
            if bias is not None and bias._version != version:
                raise RuntimeError("the bias has been modified by an inplace operation")
            grads: Gradients = right_backward(ctx, dy)
            return grads

        with (
            mock.patch.object(_Normalise, "forward", staticmethod(forward)),
            mock.patch.object(_Normalise, "backward", staticmethod(backward)),
        ):
            yield


@breaks("sync_batchnorm/second-derivative", says=r"second gradient: rank \d is wrong")
class ForgetsHowStatisticsMove(Patch):
    """Backward is differentiated as if the statistics were constants."""

    base = "impl"

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        right = _Normalise.backward

        def backward(ctx: Any, dy: Tensor) -> Gradients:
            (grad, *others) = right(ctx, dy)
            return (grad + 0 * dy if torch.is_grad_enabled() else grad, *others)

        with mock.patch.object(_Normalise, "backward", staticmethod(backward)):
            yield


@breaks("sync_batchnorm/half-input", says=r"output: rank \d is wrong\s+got float32")
class ReturnsWhatItComputesIn(LayerFault, SyncBatchNorm):
    """A batch of a half type comes back as float32."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).float()


@breaks("sync_batchnorm/half-model", says=r"(?i)dtype|same type|Half")
class KeepsStatisticsInFloat32(LayerFault, SyncBatchNorm):
    """Statistics of a half model meet those of a batch in float32."""

    def forward(self, input: Tensor) -> Tensor:
        if self.training and self.running_mean is not None:
            self.running_mean.lerp_(torch.zeros(self.num_features), 0.0)
        return super().forward(input)


@breaks("sync_batchnorm/untracked", says=r"'NoneType' object has no attribute")
class NeedsStatistics(LayerFault, SyncBatchNorm):
    """Cannot train without running statistics."""

    def forward(self, input: Tensor) -> Tensor:
        running: Any = self.running_mean
        running.add_(0)
        return super().forward(input)


@breaks("sync_batchnorm/cumulative-average", says=r"running_mean after step \d: rank \d is wrong")
class AveragesWithTheLastOne(LayerFault, SyncBatchNorm):
    """Without momentum, the newest batch counts as much as all before it."""

    def _count_batch(self) -> float:
        factor = super()._count_batch()
        return 0.5 if self.momentum is None and factor < 1 else factor


@breaks("sync_batchnorm/counts-batches", says=r"rank 0 is wrong")
class CountsEval(LayerFault, SyncBatchNorm):
    """Batches of eval mode are counted too."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            self._count_batch()
        return super().forward(input)
