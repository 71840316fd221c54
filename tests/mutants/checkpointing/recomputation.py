"""Mutants of conformance/spec/checkpointing/recomputation.py."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from conformance.spec.checkpointing import networks
from impl.sync_batchnorm import SyncBatchNorm
from impl.sync_batchnorm.normalise import Exchange
from tests.mutants.checkpointing.kit import ANY_LAYER, ExchangesNothing
from tests.mutants.kit import Patch, breaks
from tests.mutants.wrappers import LayerMutant, WrapperMutant


@breaks("checkpointing/dropout", says=r"two ranks drew the same numbers")
class SeedsEveryStep(WrapperMutant):
    """Each forward pass starts from the same random numbers, on all ranks."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        torch.manual_seed(0)
        return super().forward(*args, **kwargs)


@breaks("checkpointing/random-numbers-go-on", says=r"drew \[.*\], and without checkpoints")
class DoesNotRestoreTheRandomState(Patch):
    """A recomputation draws random numbers as if it were the first run."""

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        careless = functools.partial(checkpoint, preserve_rng_state=False)
        with mock.patch.object(networks, "checkpoint", careless):
            yield


@breaks("checkpointing/autocast", says=r"activations were of \['torch.float32'")
class RunsOutsideAutocast(WrapperMutant):
    """The module runs outside autocast, in forward and in recomputations."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return super().forward(*args, **kwargs)


@breaks("checkpointing/same-bits", says=r"gradients: rank 0 is wrong")
class RoundsDifferentlyEachTime(WrapperMutant):
    """A hook scales gradients by a little more in each wrapper."""

    made: ClassVar[int] = 0

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        RoundsDifferentlyEachTime.made += 1
        factor = 1 + 1e-6 * self.made
        for parameter in module.parameters():
            parameter.register_hook(lambda grad: grad * factor)


@breaks("checkpointing/sync-batchnorm", says=r"step 1: gradient of .*: rank \d is wrong")
@breaks("sync_batchnorm/without-gradients", says=r"output: rank \d is wrong")
class NormalisesAloneWithoutGradMode(LayerMutant, SyncBatchNorm):
    """Takes a forward pass without gradients, such as the first of a reentrant one, for eval."""

    def _exchange(self) -> Exchange | None:
        return super()._exchange() if torch.is_grad_enabled() else None


@breaks(
    "checkpointing/sync-batchnorm-statistics", says=r"running_\w+ after step 1: rank \d is wrong"
)
class TracksNothingWithoutGradMode(LayerMutant, SyncBatchNorm):
    """A forward pass without gradients does not update the statistics."""

    def forward(self, input: Tensor) -> Tensor:
        tracked = self.track_running_stats
        self.track_running_stats = tracked and torch.is_grad_enabled()
        try:
            return super().forward(input)
        finally:
            self.track_running_stats = tracked


@breaks("checkpointing/structured", says=ANY_LAYER)
class DoesNotAverageDictionaryOutputs(ExchangesNothing):
    """What a checkpoint returns in a dictionary is not averaged."""
