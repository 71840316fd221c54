"""SyncBatchNorm that goes wrong for some shapes, memory formats and types."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from impl.sync_batchnorm import SyncBatchNorm
from tests.mutants.kit import Patch, breaks
from tests.mutants.wrappers import LayerFault
from tests.mutants.sync_batchnorm.backward import Gradients, ReadsGradientsInMemoryOrder, backward_as


@breaks("sync_batchnorm/dimensions", says=r"expected 2D, 3D or 4D input")
class KnowsNoVolumes(LayerFault, SyncBatchNorm):
    """An input of five dimensions is refused."""

    def forward(self, input: Tensor) -> Tensor:
        if input.dim() > 4:
            raise ValueError("expected 2D, 3D or 4D input")
        return super().forward(input)


@breaks("sync_batchnorm/empty-on-all-ranks", says=r"no values to normalise")
class RefusesNothing(LayerFault, SyncBatchNorm):
    """An empty batch is refused."""

    def forward(self, input: Tensor) -> Tensor:
        if not input.numel():
            raise ValueError("no values to normalise")
        return super().forward(input)


@breaks("sync_batchnorm/channels-last", says=r"(?i)channels.last")
class ReturnsContiguous(LayerFault, SyncBatchNorm):
    """The output is contiguous, whatever the input was."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).contiguous()


@breaks("sync_batchnorm/non-contiguous", says=r"output: rank \d is wrong|bounds")
class ReadsInMemoryOrder(LayerFault, SyncBatchNorm):
    """Takes its input for contiguous."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.as_strided(input.shape, torch.empty(input.shape).stride()))


@breaks("sync_batchnorm/gradient-layout", says=r"gradient of the input: rank \d|bounds|too small")
class TakesGradientsForContiguous(ReadsGradientsInMemoryOrder):
    """Reads the gradient of the output as it lies."""


@breaks("sync_batchnorm/half-does-not-overflow", says=r"rank \d is wrong[\s\S]*got nan")
class AddsUpInHalf(LayerFault, SyncBatchNorm):
    """A sum over the batch is made in the batch's type."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 0 * input.detach().square().sum()


@breaks("sync_batchnorm/autocast", says=r"got 'torch.bfloat16', want 'torch.float32'")
class FollowsAutocast(LayerFault, SyncBatchNorm):
    """The output has autocast's type."""

    def forward(self, input: Tensor) -> Tensor:
        y = super().forward(input)
        return y.to(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else y


@breaks("sync_batchnorm/input-without-gradient", says=r"gradient of weight: rank \d[\s\S]*got None")
class StopsAtTheFirstLayer(Patch):
    """Where the input requires no gradient, the parameters get none."""

    base = "impl"

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        def change(ctx: Any, grads: Gradients) -> Gradients:
            return grads if grads[0] is not None else (None,) * len(grads)

        with backward_as(change):
            yield


@breaks("sync_batchnorm/backward-twice", says=r"pass 2: rank \d is wrong")
class DoublesTheSecondTime(Patch):
    """A second pass through a graph finds what the first one left."""

    base = "impl"

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        def change(ctx: Any, grads: Gradients) -> Gradients:
            again = getattr(ctx, "ran_before", False)
            ctx.ran_before = True
            return tuple(None if g is None else g * 2 for g in grads) if again else grads

        with backward_as(change):
            yield
