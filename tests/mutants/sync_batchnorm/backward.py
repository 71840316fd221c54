"""Mutants of conformance/spec/sync_batchnorm/backward.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from impl.sync_batchnorm import SyncBatchNorm
from impl.sync_batchnorm.normalise import Exchange
from tests.mutants.kit import Patch, breaks
from tests.mutants.sync_batchnorm.kit import (
    ExchangeMutant,
    Gradients,
    Normalise,
    Wrong,
    backward_as,
)
from tests.mutants.wrappers import LayerMutant


class _WithoutBackward(Wrong):
    def all_reduce(self, vector: Tensor) -> Tensor:
        own = vector * self.world_size
        super().all_reduce(vector)
        return own


@breaks("sync_batchnorm/input-gradient", says=r"gradient of the input: rank \d is wrong")
class KeepsGradientsToItself(ExchangeMutant):
    """Backward uses this rank's gradients in place of the other ranks'."""

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
class WeighsGradientsOfRanksAlike(ExchangeMutant):
    """Backward averages the ranks' means."""

    exchange = _EqualWeights


@breaks("sync_batchnorm/one-element", says=r"gradient of weight: rank 0 is wrong")
class LeavesOneElementOut(Patch):
    """A batch of one number adds nothing to the gradients of weight and bias."""

    base = "impl"

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        def change(ctx: Any, grads: Gradients) -> Gradients:
            x, *_ = ctx.saved_tensors
            if x.numel() > 1:
                return grads
            of_x, of_weight, of_bias, *rest = grads
            return of_x, 0 * of_weight, 0 * of_bias, *rest

        with backward_as(change):
            yield


@breaks("sync_batchnorm/transposed-neighbours", says=r"gradient of .*: rank \d is wrong")
class ReadsGradientsInMemoryOrder(Patch):
    """The gradient that comes in is read as if it were contiguous."""

    base = "impl"

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        right = Normalise.backward

        def backward(ctx: Any, dy: Tensor) -> Gradients:
            contiguous = torch.empty(dy.shape).stride()
            grads: Gradients = right(ctx, dy.as_strided(dy.shape, contiguous))
            return grads

        with mock.patch.object(Normalise, "backward", staticmethod(backward)):
            yield


@breaks("sync_batchnorm/gradient-layout", says=r"gradient of the input: rank \d|bounds|too small")
class TakesGradientsForContiguous(ReadsGradientsInMemoryOrder):
    """The gradient of the output is read in memory order, whatever its strides."""


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
class SecondBackwardDoublesGradients(Patch):
    """A second backward pass through a graph gives gradients twice as large."""

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


@breaks("sync_batchnorm/network", says=r"gradient of .*: rank \d is wrong")
class SkipsLayersThatAreNotAffine(LayerMutant, SyncBatchNorm):
    """Layers without parameters normalise by themselves."""

    def _exchange(self) -> Exchange | None:
        return super()._exchange() if self.affine else None


@breaks("sync_batchnorm/used-twice", says=r"running_mean: rank \d is wrong")
class TracksOnlyTheFirstBatchOfAStep(LayerMutant, SyncBatchNorm):
    """A second batch before the next step does not update the statistics."""

    def forward(self, input: Tensor) -> Tensor:
        self.track_running_stats = "used" not in vars(self)
        vars(self)["used"] = True
        return super().forward(input)


@breaks("sync_batchnorm/frozen-parameters", says=r"the frozen weight has a gradient")
class UnfreezesItsWeight(LayerMutant, SyncBatchNorm):
    """The weight always has a gradient."""

    def forward(self, input: Tensor) -> Tensor:
        self.weight.requires_grad_()
        return super().forward(input)


@breaks("sync_batchnorm/frozen-parameters", says=r"running_mean: rank 0 is wrong")
class FrozenLayersTrackNothing(LayerMutant, SyncBatchNorm):
    """A weight that requires no gradient stops updates of the statistics."""

    def forward(self, input: Tensor) -> Tensor:
        self.track_running_stats = not self.affine or self.weight.requires_grad
        return super().forward(input)


class _DividedByItsWeight(torch.autograd.Function):
    """Hands the output through, and divides it by the weight in backward."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return y.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        shape = [1, -1] + [1] * (grads[0].dim() - 2)
        return grads[0] * (weight / weight).view(shape), None


@breaks("sync_batchnorm/zero-weight", says=r"gradient of input: rank 0 is wrong[\s\S]*got nan")
class TakesItsInputFromItsOutput(LayerMutant, SyncBatchNorm):
    """Backward computes the normalised input again, out of the output: it divides by the weight."""

    def forward(self, input: Tensor) -> Tensor:
        y = super().forward(input)
        if not self.affine:
            return y
        out: Tensor = _DividedByItsWeight.apply(y, self.weight.detach())  # type: ignore[no-untyped-call]  # in torch
        return out


class _Kept(torch.autograd.Function):
    """Hands x through and keeps it for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x.clone()
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (_,) = ctx.saved_tensors
        return grads[0]


@breaks("sync_batchnorm/output-changed-in-place", says="modified by an inplace operation")
class NeedsItsOutput(LayerMutant, SyncBatchNorm):
    def forward(self, input: Tensor) -> Tensor:
        out: Tensor = _Kept.apply(super().forward(input))  # type: ignore[no-untyped-call]  # in torch
        return out


@breaks("sync_batchnorm/changed-before-backward", says=r"gradient of the \w+: rank 0 is wrong")
class SavesDataAlone(LayerMutant, SyncBatchNorm):
    """Tensors that are saved for backward are hidden from autograd."""

    def forward(self, input: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.data, lambda data: data):
            return super().forward(input)


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
class EmptyInputsHaveNoGradient(Patch):
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


@breaks(
    "sync_batchnorm/bias-changed-before-backward", says="the bias has been modified by an inplace"
)
class RefusesAChangedBias(Patch):
    """Backward refuses a bias that was changed after forward."""

    base = "impl"

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        right_forward, right_backward = Normalise.forward, Normalise.backward

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
            mock.patch.object(Normalise, "forward", staticmethod(forward)),
            mock.patch.object(Normalise, "backward", staticmethod(backward)),
        ):
            yield


@breaks("sync_batchnorm/second-derivative", says=r"second gradient: rank \d is wrong")
class ForgetsHowStatisticsMove(Patch):
    """Backward is differentiated as if the statistics were constants."""

    base = "impl"

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        right = Normalise.backward

        def backward(ctx: Any, dy: Tensor) -> Gradients:
            (grad, *others) = right(ctx, dy)
            return (grad + 0 * dy if torch.is_grad_enabled() else grad, *others)

        with mock.patch.object(Normalise, "backward", staticmethod(backward)):
            yield
