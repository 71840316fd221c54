"""DDP that is wrong about mixed precision, norms and what goes on from step to step."""

from __future__ import annotations

from typing import Any

from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from impl.ddp.buckets.bucket import Bucket
from impl.ddp.iteration.reduction import BucketReduction
from impl.ddp.wrapper.api import DistributedDataParallel
from impl.ddp.wrapper.mixed_precision import MixedPrecision, _Precisions
from tests.mutants.ddp.kit import DDPFault, afterwards, beforehand, instead, swap
from tests.mutants.kit import breaks


def _halve(reduction: BucketReduction, bucket: Bucket, *_: Any) -> None:
    if bucket.index and bucket.buffer is not None:
        bucket.buffer.div_(2)


@breaks("ddp/gradients/norm", says="norm: rank 0 is wrong")
class HalvesEveryBucketButTheFirst(DDPFault):
    patched = beforehand(BucketReduction, "start", _halve)


def _end_recording(ddp: DistributedDataParallel) -> None:
    if ddp.reducer._static is not None:
        ddp.reducer._static.end_recording()


@breaks("ddp/static-graph/no-sync-first", says="training graph has changed")
class TakesNoSyncForTheFirstStep(DDPFault):
    patched = beforehand(DistributedDataParallel, "no_sync", _end_recording)


@breaks("ddp/mixed-precision/dtypes", says="dtypes: rank 0 is wrong")
class BuffersKeepTheirPrecision(DDPFault):
    patched = instead(MixedPrecision, "_cast_buffers", lambda self, ignored: None)


def _raise_gradient(precisions: _Precisions) -> None:
    grad = precisions.param.grad
    if grad is not None:
        grad.data = grad.float() + 1


@breaks("ddp/mixed-precision/kept-gradients", says="raised|gradient of step")
class KeepsHighGradientsInBackward(DDPFault):
    patched = afterwards(_Precisions, "lower", _raise_gradient)


def _drop_gradient(precisions: _Precisions) -> None:
    if precisions.param.grad is not None:
        precisions.param.grad.zero_()


@breaks("ddp/mixed-precision/kept-gradients", says="sum after step 2: rank 0 is wrong")
class ReplacesTheKeptGradient(DDPFault):
    """What a step brings stands in place of what there was."""

    patched = afterwards(_Precisions, "lower", _drop_gradient)


@breaks("ddp/mixed-precision/average", says="gradient of step 1")
class LowPrecisionIsNotAveraged(DDPFault):
    patched = beforehand(BucketReduction, "start", lambda self, bucket, *_: bucket.buffer.mul_(3))


@breaks("ddp/mixed-precision/without-backward", says="dtypes: rank 0 is wrong")
class WaitsForABackwardThatDoesNotCome(DDPFault):
    patched = instead(DistributedDataParallel, "_no_backward_follows", lambda self: None)


def _forgetful(right: Any) -> Any:
    def hook(state: Any, bucket: Any) -> Any:
        state.p_memory_dict.clear()
        state.q_memory_dict.clear()
        return right(state, bucket)

    hook.__annotations__.clear()  # they are strings here, and contradict what a hook's should be
    return hook


@breaks("comm_hooks/library/power-sgd-state", says="Q begins again")
class PowerSGDBeginsAgain(DDPFault):
    patched = swap(powerSGD_hook, "powerSGD_hook", _forgetful)
