"""SyncBatchNorm that keeps what it should ask for anew, or lets go of what it should keep."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from impl.sync_batchnorm import SyncBatchNorm
from impl.sync_batchnorm.normalise import Exchange
from tests.mutants.kit import breaks
from tests.mutants.wrappers import LayerFault


@breaks("sync_batchnorm/made-before-groups", says=r"output: rank \d is wrong")
class AsksForGroupsWhenItIsMade(LayerFault, SyncBatchNorm):
    """A layer that was made without groups stays without."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.has_groups = dist.is_initialized()

    def _exchange(self) -> Exchange | None:
        return super()._exchange() if self.has_groups else None


@breaks("sync_batchnorm/options-changed", says=r"running_mean: rank 0 is wrong")
class KeepsItsFirstMomentum(LayerFault, SyncBatchNorm):
    """A momentum that is set later is ignored."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.first_momentum = self.momentum

    def _count_batch(self) -> float:
        self.momentum = self.first_momentum
        return super()._count_batch()


@breaks("sync_batchnorm/options-changed", says=r"output: rank \d is wrong")
class KeepsItsFirstGroup(LayerFault, SyncBatchNorm):
    """A process_group that is set later is ignored."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.first_group = self.process_group

    def _exchange(self) -> Exchange | None:
        self.process_group = self.first_group
        return super()._exchange()


@breaks("sync_batchnorm/cumulative-average-resumed", says=r"running_mean: rank \d is wrong")
class CountsByItself(LayerFault, SyncBatchNorm):
    """The average is over the batches that this very layer has seen."""

    seen = 0

    def _count_batch(self) -> float:
        self.seen += 1
        share = super()._count_batch()
        return 1 / self.seen if self.momentum is None else share


@breaks("sync_batchnorm/statistics-in-place", says=r"running_mean")
class HasNewStatisticsForEachBatch(LayerFault, SyncBatchNorm):
    """Each batch leaves other buffers under the same names."""

    def forward(self, input: Tensor) -> Tensor:
        if self.running_mean is not None and self.running_var is not None:
            self.running_mean, self.running_var = self.running_mean + 0, self.running_var + 0
        return super().forward(input)


@breaks("sync_batchnorm/outputs-are-let-go", says=r"alive: rank 0 is wrong")
class KeepsItsLastOutput(LayerFault, SyncBatchNorm):
    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(input)
        vars(self)["last_output"] = output
        return output
