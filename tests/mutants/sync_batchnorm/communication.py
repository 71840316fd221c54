"""Mutants of conformance/spec/sync_batchnorm/communication.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.verdict import Verdict
from impl.sync_batchnorm import SyncBatchNorm, module
from impl.sync_batchnorm.normalise import Exchange, GroupExchange
from tests.mutants.kit import Patch, breaks
from tests.mutants.sync_batchnorm.kit import ExchangeMutant, Gradients, Wrong, backward_as
from tests.mutants.wrappers import LayerMutant


class _TwoMessages(Wrong):
    def all_gather(self, message: Tensor) -> Tensor:
        half = len(message) // 2
        parts = [super(_TwoMessages, self).all_gather(m) for m in (message[:half], message[half:])]
        return torch.cat(parts, dim=1)


@breaks("sync_batchnorm/one-collective-each-way", says=r"forward issued all_gather.*, all_gather")
class SendsMeanAndVarianceApart(ExchangeMutant):
    """Forward issues two collectives, one each for mean and variance."""

    exchange = _TwoMessages


class _LongMessage(Wrong):
    def all_gather(self, message: Tensor) -> Tensor:
        return super().all_gather(message.repeat(50))[:, : len(message)]


@breaks("sync_batchnorm/small-messages", says=r"all_gather.* for 3 channels")
class SendsMoreThanItNeeds(ExchangeMutant):
    """Each message holds fifty copies of the data."""

    exchange = _LongMessage


@breaks("sync_batchnorm/group", says=r"output.*: rank \d is wrong|Error")
class NormalisesOverTheWorld(LayerMutant, SyncBatchNorm):
    """process_group is ignored."""

    def _exchange(self) -> Exchange | None:
        return GroupExchange(None, dist.get_world_size())


@breaks("sync_batchnorm/alone", says=r"operations: rank \d is wrong")
class ExchangesWithItself(LayerMutant, SyncBatchNorm):
    """A group of one rank communicates too."""

    def _exchange(self) -> Exchange | None:
        return GroupExchange(self.process_group, dist.get_world_size(self.process_group))


@breaks("sync_batchnorm/silent-eval", says=r"all_reduce #\d", verdict=Verdict.TIMEOUT)
class ExchangesInEval(LayerMutant, SyncBatchNorm):
    """Eval mode waits for the other ranks."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            dist.all_reduce(torch.zeros(1), group=self.process_group)
        return super().forward(input)


@breaks("sync_batchnorm/made-before-groups", says=r"output: rank \d is wrong")
class AsksForGroupsWhenItIsMade(LayerMutant, SyncBatchNorm):
    """A layer that was made before groups existed never uses one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.has_groups = dist.is_initialized()

    def _exchange(self) -> Exchange | None:
        return super()._exchange() if self.has_groups else None


class _Shorter(GroupExchange):
    def all_gather(self, message: Tensor) -> Tensor:
        return super().all_gather(message if message[-1] else message[:1])


@breaks("sync_batchnorm/same-calls", says=r"all_gather|operations")
class SendsAShorterMessageForAnEmptyBatch(LayerMutant, SyncBatchNorm):
    """The message of an empty batch is shorter."""

    def _exchange(self) -> Exchange | None:
        right = super()._exchange()
        return _Shorter(right.group, right.world_size) if isinstance(right, GroupExchange) else None


@breaks("sync_batchnorm/outside-of-the-group", says=r"is not in the group")
class RefusesOutsiders(LayerMutant, SyncBatchNorm):
    """A rank outside of the group cannot use the layer."""

    def _exchange(self) -> Exchange | None:
        if dist.get_world_size(self.process_group) < 0:
            raise RuntimeError("this rank is not in the group")
        return super()._exchange()


@breaks("sync_batchnorm/without-groups", says=r"Default process group has not been initialized")
class NeedsAGroup(LayerMutant, SyncBatchNorm):
    """A layer cannot train before groups exist."""

    def _exchange(self) -> Exchange | None:
        dist.get_world_size(self.process_group)
        return super()._exchange()


@breaks("sync_batchnorm/more-than-one-value", says=r"was to raise ValueError, and it returned")
class TrainsOnOneValue(Patch):
    """The variance of one value is taken for zero."""

    base = "impl"

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        with mock.patch.object(module, "_check_more_than_one_value"):
            yield


@breaks("sync_batchnorm/silent-backward", says=r"operations of backward: rank \d is wrong")
class ExchangesUnneededGradients(Patch):
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
