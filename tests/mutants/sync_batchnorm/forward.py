"""SyncBatchNorm whose ranks tell each other something wrong, or take it for something else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.verdict import Verdict
from impl.sync_batchnorm import SyncBatchNorm
from impl.sync_batchnorm.normalise import Exchange, GroupExchange
from tests.mutants.kit import breaks
from tests.mutants.wrappers import LayerFault


class Wrong(GroupExchange):
    """An exchange of which a fault overrides one way."""


class ExchangeFault(LayerFault, SyncBatchNorm):
    """A layer that is right but for its exchange."""

    exchange: ClassVar[type[GroupExchange]] = GroupExchange

    def _exchange(self) -> Exchange | None:
        right = super()._exchange()
        if not isinstance(right, GroupExchange):
            return right
        return self.exchange(right.group, right.world_size)


class _AlikeCounts(Wrong):
    def all_gather(self, message: Tensor) -> Tensor:
        messages = super().all_gather(message)
        messages[:, -1] = messages[:, -1].mean()
        return messages


@breaks("sync_batchnorm/unequal-batches", says=r"output: rank \d is wrong")
class CountsAllRanksAlike(ExchangeFault):
    """The mean is that of the ranks' means, and so is the variance."""

    exchange = _AlikeCounts


class _OwnCount(Wrong):
    def all_gather(self, message: Tensor) -> Tensor:
        messages = super().all_gather(message)
        messages[:, -1] = message[-1]
        return messages


@breaks("sync_batchnorm/same-statistics", says=r"running_\w+ after step 1: rank \d is wrong|differ")
class CountsItsOwnBatch(ExchangeFault):
    """Each rank takes the others' batches to be as large as its own."""

    exchange = _OwnCount


@breaks("sync_batchnorm/half-counts", says=r"running_mean: rank 0 is wrong|output: rank 0 is wrong")
class CountsInTheInputsType(LayerFault, SyncBatchNorm):
    """Ranks tell each other their numbers of values in the type of the input."""

    def forward(self, input: Tensor) -> Tensor:
        self.counts_in = input.dtype
        return super().forward(input)

    def _exchange(self) -> Exchange | None:
        right = super()._exchange()
        if not isinstance(right, GroupExchange):
            return right
        return _RoundedCounts(right.group, right.world_size, self.counts_in)


@dataclass(frozen=True)
class _RoundedCounts(Wrong):
    counts_in: torch.dtype

    def all_gather(self, message: Tensor) -> Tensor:
        messages = super().all_gather(message)
        messages[:, -1] = messages[:, -1].to(self.counts_in)
        return messages


class _WithoutBackward(Wrong):
    def all_reduce(self, vector: Tensor) -> Tensor:
        own = vector * self.world_size
        super().all_reduce(vector)
        return own


@breaks("sync_batchnorm/input-gradient", says=r"gradient of the input: rank \d is wrong")
class KeepsGradientsToItself(ExchangeFault):
    """Takes the other ranks' gradients to be like its own."""

    exchange = _WithoutBackward


class _EqualWeights(Wrong):
    counts: ClassVar[list[float]] = []

    def all_gather(self, message: Tensor) -> Tensor:
        messages = super().all_gather(message)
        self.counts[:] = [float(message[-1]), float(messages[:, -1].sum())]
        return messages

    def all_reduce(self, vector: Tensor) -> Tensor:
        own, total = self.counts
        return super().all_reduce(vector / own * total / self.world_size)


@breaks("sync_batchnorm/unequal-gradients", says=r"gradient of the input: rank \d is wrong")
class WeighsGradientsOfRanksAlike(ExchangeFault):
    """Backward averages the ranks' means."""

    exchange = _EqualWeights


class _TwoMessages(Wrong):
    def all_gather(self, message: Tensor) -> Tensor:
        half = len(message) // 2
        parts = [super(_TwoMessages, self).all_gather(m) for m in (message[:half], message[half:])]
        return torch.cat(parts, dim=1)


@breaks("sync_batchnorm/one-collective-each-way", says=r"forward issued all_gather.*, all_gather")
class SendsMeanAndVarianceApart(ExchangeFault):
    """Two collectives forward."""

    exchange = _TwoMessages


class _LongMessage(Wrong):
    def all_gather(self, message: Tensor) -> Tensor:
        return super().all_gather(message.repeat(50))[:, : len(message)]


@breaks("sync_batchnorm/small-messages", says=r"all_gather.* for 3 channels")
class SendsMoreThanItNeeds(ExchangeFault):
    """Each message holds fifty copies."""

    exchange = _LongMessage


class _OneNanForAll(Wrong):
    def all_gather(self, message: Tensor) -> Tensor:
        messages = super().all_gather(message)
        return messages * 0 + messages.isnan().any() * torch.nan + messages.nan_to_num()


@breaks("sync_batchnorm/channels-apart", says=r"output: rank \d is wrong")
class SpreadsNaN(ExchangeFault):
    """One channel that is not a number spoils all of them."""

    exchange = _OneNanForAll


@breaks("sync_batchnorm/group", says=r"output.*: rank \d is wrong|Error")
class NormalisesOverTheWorld(LayerFault, SyncBatchNorm):
    """Ignores process_group."""

    def _exchange(self) -> Exchange | None:
        return GroupExchange(None, dist.get_world_size())


@breaks("sync_batchnorm/alone", says=r"operations: rank \d is wrong")
class ExchangesWithItself(LayerFault, SyncBatchNorm):
    """A group of one rank communicates too."""

    def _exchange(self) -> Exchange | None:
        return GroupExchange(self.process_group, dist.get_world_size(self.process_group))


@breaks("sync_batchnorm/silent-eval", says=r"all_reduce #\d", verdict=Verdict.TIMEOUT)
class ExchangesInEval(LayerFault, SyncBatchNorm):
    """Eval mode waits for the other ranks."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            dist.all_reduce(torch.zeros(1), group=self.process_group)
        return super().forward(input)


@breaks("sync_batchnorm/empty-on-some-ranks", says=r"all_gather #\d", verdict=Verdict.TIMEOUT)
class EmptyBatchesStayOut(LayerFault, SyncBatchNorm):
    """A rank without values returns at once, and the others wait."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) if input.numel() else input * 1


@breaks("sync_batchnorm/one-value-a-rank", says=r"Expected more than 1 value")
class WantsTwoValuesOnEachRank(LayerFault, SyncBatchNorm):
    """The rule about one value per channel is applied to a rank's own batch."""

    def forward(self, input: Tensor) -> Tensor:
        if self.training and input.numel() == input.size(1):
            raise ValueError("Expected more than 1 value per channel when training")
        return super().forward(input)
