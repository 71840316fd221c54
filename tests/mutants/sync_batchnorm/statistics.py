"""Mutants of conformance/spec/sync_batchnorm/statistics.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional

from impl.sync_batchnorm import SyncBatchNorm, module
from impl.sync_batchnorm.moments import Moments
from impl.sync_batchnorm.normalise import Exchange
from tests.mutants.kit import Patch, breaks
from tests.mutants.sync_batchnorm.kit import ExchangeMutant, Wrong
from tests.mutants.wrappers import LayerMutant


class _OwnCount(Wrong):
    def all_gather(self, message: Tensor) -> Tensor:
        messages = super().all_gather(message)
        messages[:, -1] = message[-1]
        return messages


@breaks("sync_batchnorm/same-statistics", says=r"running_\w+ after step 1: rank \d is wrong|differ")
class CountsItsOwnBatch(ExchangeMutant):
    """Each rank takes the others' batches to be as large as its own."""

    exchange = _OwnCount


@breaks("sync_batchnorm/statistics-without-gradients", says="running_mean: rank 0 is wrong")
class TakesNoGradForEval(LayerMutant, SyncBatchNorm):
    """Batches under torch.no_grad do not change the running statistics."""

    def _count_batch(self) -> float:
        return super()._count_batch() if torch.is_grad_enabled() else 0.0


@breaks("sync_batchnorm/options-changed", says=r"running_mean: rank 0 is wrong")
class KeepsItsFirstMomentum(LayerMutant, SyncBatchNorm):
    """A momentum that is set later is ignored."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.first_momentum = self.momentum

    def _count_batch(self) -> float:
        self.momentum = self.first_momentum
        return super()._count_batch()


@breaks("sync_batchnorm/options-changed", says=r"output: rank \d is wrong")
class KeepsItsFirstGroup(LayerMutant, SyncBatchNorm):
    """A process_group that is set later is ignored."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.first_group = self.process_group

    def _exchange(self) -> Exchange | None:
        self.process_group = self.first_group
        return super()._exchange()


@breaks("sync_batchnorm/cumulative-average-resumed", says=r"running_mean: rank \d is wrong")
class IgnoresTheLoadedCount(LayerMutant, SyncBatchNorm):
    """The average covers only the batches that this layer itself has seen."""

    seen = 0

    def _count_batch(self) -> float:
        self.seen += 1
        share = super()._count_batch()
        return 1 / self.seen if self.momentum is None else share


@breaks("sync_batchnorm/statistics-in-place", says=r"running_mean")
class HasNewStatisticsForEachBatch(LayerMutant, SyncBatchNorm):
    """Each batch replaces the buffers by new ones of the same names."""

    def forward(self, input: Tensor) -> Tensor:
        if self.running_mean is not None and self.running_var is not None:
            self.running_mean, self.running_var = self.running_mean + 0, self.running_var + 0
        return super().forward(input)


@breaks("sync_batchnorm/eval", says=r"output: rank \d is wrong")
class EvaluatesByTheBatch(LayerMutant, SyncBatchNorm):
    """Eval mode normalises by the batch's own statistics."""

    def forward(self, input: Tensor) -> Tensor:
        if self.training:
            return super().forward(input)
        return functional.batch_norm(input, None, None, self.weight, self.bias, True, 0.0, self.eps)


@breaks("sync_batchnorm/eval", says=r"gradient of weight: rank 0 is wrong")
class FoldsItsParametersInEval(LayerMutant, SyncBatchNorm):
    """Eval mode treats weight and bias as constants too."""

    def forward(self, input: Tensor) -> Tensor:
        if self.training or self.running_mean is None or self.running_var is None:
            return super().forward(input)
        weight, bias = self.weight.detach(), self.bias.detach()
        mean, var = self.running_mean, self.running_var
        return functional.batch_norm(input, mean, var, weight, bias, False, 0.0, self.eps)


@breaks("sync_batchnorm/eval-formats", says=r"torch\.float32.*torch\.bfloat16")
class EvaluatesInItsOwnType(LayerMutant, SyncBatchNorm):
    """The output of eval mode has the dtype of the statistics."""

    def forward(self, input: Tensor) -> Tensor:
        if self.training or self.running_mean is None:
            return super().forward(input)
        return super().forward(input.to(self.running_mean.dtype))


@breaks("sync_batchnorm/eval-untracked", says=r"output: rank \d is wrong")
class UntrackedEvalDoesNotNormalise(LayerMutant, SyncBatchNorm):
    """Eval mode without statistics takes mean 0 and variance 1."""

    def forward(self, input: Tensor) -> Tensor:
        if self.training or self.running_mean is not None:
            return super().forward(input)
        zero = torch.zeros(self.num_features, dtype=input.dtype)
        return functional.batch_norm(input, zero, zero + 1, self.weight, self.bias, False)


@breaks("sync_batchnorm/eval-after-training", says=r"mean: rank \d is wrong")
class StaysInEval(LayerMutant, SyncBatchNorm):
    """After one evaluation, statistics are never updated again."""

    evaluated = False

    def train(self, mode: bool = True) -> StaysInEval:
        self.evaluated = self.evaluated or not mode
        super().train(mode and not self.evaluated)
        return self


@breaks("sync_batchnorm/tracking-switched-off", says=r"rank \d is wrong")
class IgnoresThatTrackingIsOff(LayerMutant, SyncBatchNorm):
    """Statistics are updated although tracking was switched off."""

    def forward(self, input: Tensor) -> Tensor:
        self.track_running_stats = self.running_mean is not None
        return super().forward(input)


@breaks("sync_batchnorm/reset", says=r"rank 0 is wrong")
class ResetsMeanAndVarianceAlone(LayerMutant, SyncBatchNorm):
    """The count of batches is not reset."""

    def reset_running_stats(self) -> None:
        count: Any = getattr(self, "num_batches_tracked", None)
        before = None if count is None else count.clone()
        super().reset_running_stats()
        if before is not None:
            count.copy_(before)


@breaks("sync_batchnorm/running-statistics", says=r"running_var.*: rank \d is wrong")
class TracksTheBiasedVariance(Patch):
    """running_var moves towards the biased variance."""

    base = "impl"

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        with mock.patch.object(Moments, "unbiased_variance", Moments.variance):
            yield


@breaks("sync_batchnorm/empty-statistics", says=r"an empty batch moved running_mean")
class EmptyBatchesMoveStatistics(Patch):
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


@breaks("sync_batchnorm/untracked", says=r"'NoneType' object has no attribute")
class NeedsStatistics(LayerMutant, SyncBatchNorm):
    """Cannot train without running statistics."""

    def forward(self, input: Tensor) -> Tensor:
        running: Any = self.running_mean
        running.add_(0)
        return super().forward(input)


@breaks("sync_batchnorm/cumulative-average", says=r"running_mean after step \d: rank \d is wrong")
class AveragesWithTheLastOne(LayerMutant, SyncBatchNorm):
    """Without momentum, the newest batch counts as much as all before it."""

    def _count_batch(self) -> float:
        factor = super()._count_batch()
        return 0.5 if self.momentum is None and factor < 1 else factor


@breaks("sync_batchnorm/counts-batches", says=r"rank 0 is wrong")
class CountsEval(LayerMutant, SyncBatchNorm):
    """Batches of eval mode are counted too."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            self._count_batch()
        return super().forward(input)


@breaks("sync_batchnorm/cumulative-average", says="running_mean: rank 0 is wrong")
@breaks("sync_batchnorm/cumulative-average-resumed", says="running_mean: rank 0 is wrong")
class CountsBatchesByItself(LayerMutant, SyncBatchNorm):
    """The average is over the batches of this layer, and not over those of its state."""

    batches = 0

    def _count_batch(self) -> float:
        factor = super()._count_batch()
        self.batches += 1
        return factor if self.momentum is not None else 1 / self.batches
