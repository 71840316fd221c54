"""Mutants of conformance/spec/ddp/gradients.py."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from conformance.verdict import Verdict
from impl.ddp.buckets import layout
from impl.ddp.buckets.bucket import Bucket
from impl.ddp.iteration.grad_copy import GradientCopier
from impl.ddp.iteration.reducer import Reducer
from impl.ddp.iteration.reduction import BucketReduction
from impl.ddp.wrapper.delayed_all_reduce import DelayedAllReduce
from tests.mutants.ddp.kit import DDPMutant, afterwards, beforehand, forget, instead, replace, swap
from tests.mutants.kit import breaks


def _halve(reduction: BucketReduction, bucket: Bucket, *_: Any) -> None:
    if bucket.index and bucket.buffer is not None:
        bucket.buffer.div_(2)


@breaks("ddp/gradients/norm", says="norm: rank 0 is wrong")
class HalvesEveryBucketButTheFirst(DDPMutant):
    patched = beforehand(BucketReduction, "start", _halve)


@breaks("ddp/gradients/strides-with-gaps", says="out of bounds for storage")
class GradientsHaveGapsToo(DDPMutant):
    """A gradient has its parameter's strides, whether or not these are dense."""

    patched = instead(layout, "gradient_strides", lambda param: param.stride())


@breaks("ddp/gradients/batched-copy", says="gradient of .* in step 1")
class DividesBatchesTwice(DDPMutant):
    @staticmethod
    def _again(copier: Any, slots: Any, copied: Any, resident: Any, divisor: int) -> None:
        if copier.divide_once_per_bucket and slots.whole is not None:
            slots.whole.div_(divisor)

    patched = afterwards(GradientCopier, "_scale", _again)


@breaks("ddp/gradients/strides", says="a gradient of strides")
@breaks("ddp/gradients/bucket-views-strides", says="a gradient of strides")
class RowMajorGradients(DDPMutant):
    patched = replace(lambda grad: grad.contiguous())


@breaks("ddp/gradients/bucket-views", says="storages of 4 views")
class IgnoresBucketViews(DDPMutant):
    patched = swap(
        GradientCopier,
        "__init__",
        lambda right: (
            lambda self, **options: right(self, **{**options, "gradient_as_bucket_view": False})
        ),
    )


@breaks("ddp/gradients/bucket-views-stay", says="gradients were in")
@breaks("ddp/gradients/accumulate-in-place", says="the same: rank 0 is wrong")
class GradientsAreCopied(DDPMutant):
    patched = replace(lambda grad: grad.clone())


@breaks("ddp/gradients/delayed", says="gradient 2 of step 1: rank 0 is wrong")
class HalvesDelayedGradients(DDPMutant):
    """Delayed gradients are halved before the sum, as if there were two ranks."""

    patched = beforehand(
        DelayedAllReduce,
        "_reduce",
        lambda self, _: self._buffer.mul_(self.group.size() / 2),
    )


def _over_all_ranks(self: DelayedAllReduce, grad: Tensor) -> Tensor:
    self._buffer.div_(self.group.size())
    dist.all_reduce(self._buffer)
    return grad


@breaks(
    "ddp/gradients/delayed", says=r"part=part|ws3-part|rank 2 had returned", verdict=Verdict.TIMEOUT
)
class DelayedAreReducedOverAllRanks(DDPMutant):
    patched = instead(DelayedAllReduce, "_reduce", _over_all_ranks)


@breaks("ddp/gradients/delayed", says="gradient . of step 1")
class DelayedForever(DDPMutant):
    patched = instead(DelayedAllReduce, "_reduce", lambda self, grad: grad)


def _clears_all_or_none(self: DelayedAllReduce) -> None:
    if all(param.grad is None for param in self._params):
        self._buffer.zero_()
    for param, view in zip(self._params, self._views, strict=True):
        if param.grad is None:
            param.grad = view


@breaks("ddp/gradients/delayed", says="dropped gradient: rank 0 is wrong")
class DelayedGradientsAreDroppedTogether(DDPMutant):
    """A delayed gradient that was dropped comes back, unless all of them were."""

    patched = instead(DelayedAllReduce, "attach", _clears_all_or_none)


@breaks("ddp/gradients/given-beforehand", says="gradient: rank 0 is wrong")
class IgnoresGivenGradients(DDPMutant):
    patched = afterwards(Reducer, "prepare_for_backward", forget)
