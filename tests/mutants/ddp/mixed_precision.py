"""Mutants of conformance/spec/ddp/mixed_precision.py."""

from __future__ import annotations

from typing import Any

from impl.ddp.iteration.comm_hooks import all_reduce
from impl.ddp.iteration.reduction import BucketReduction
from impl.ddp.wrapper.api import DistributedDataParallel
from impl.ddp.wrapper.mixed_precision import MixedPrecision, _Precisions
from tests.mutants.ddp.kit import DDPMutant, afterwards, beforehand, instead
from tests.mutants.kit import breaks


@breaks("ddp/mixed-precision/dtypes", says="dtypes: rank 0 is wrong")
class BuffersKeepTheirPrecision(DDPMutant):
    patched = instead(MixedPrecision, "_cast_buffers", lambda self, ignored: None)


def _raise_gradient(precisions: _Precisions) -> None:
    grad = precisions.param.grad
    if grad is not None:
        grad.data = grad.float() + 1


@breaks("ddp/mixed-precision/kept-gradients", says="raised|gradient of step")
class KeepsHighGradientsInBackward(DDPMutant):
    patched = afterwards(_Precisions, "lower", _raise_gradient)


def _drop_gradient(precisions: _Precisions) -> None:
    if precisions.param.grad is not None:
        precisions.param.grad.zero_()


@breaks("ddp/mixed-precision/kept-gradients", says="sum after step 2: rank 0 is wrong")
class ReplacesTheKeptGradient(DDPMutant):
    """The gradient of a step replaces the one that was there before."""

    patched = afterwards(_Precisions, "lower", _drop_gradient)


@breaks("ddp/mixed-precision/average", says="gradient of step 1")
class LowPrecisionIsNotAveraged(DDPMutant):
    patched = beforehand(BucketReduction, "start", lambda self, bucket, *_: bucket.buffer.mul_(3))


@breaks("ddp/mixed-precision/average", says="gradient of step 1")
class LowPrecisionIsDividedByTwo(DDPMutant):
    """Gradients in low precision are halved, as if there were two ranks."""

    patched = beforehand(
        BucketReduction,
        "start",
        lambda self, bucket, *_: bucket.buffer.mul_(self.group.size() / 2),
    )


@breaks("ddp/mixed-precision/without-backward", says="dtypes: rank 0 is wrong")
class WaitsForABackwardThatDoesNotCome(DDPMutant):
    patched = instead(DistributedDataParallel, "_no_backward_follows", lambda self: None)


def _reduce_in_full(precision: Any, _: Any, bucket: Any) -> Any:
    group = precision._reducer.process_group
    work = all_reduce(group, bucket.buffer().float().div_(group.size()))
    return work.get_future().then(lambda done: done.value()[0].half())


@breaks("ddp/mixed-precision/reduce-dtype", says=r"backward issued .*float32")
class ReducesInFullPrecision(DDPMutant):
    patched = instead(MixedPrecision, "reduce_hook", _reduce_in_full)


def _reduce_as_it_is(precision: Any, _: Any, bucket: Any) -> Any:
    group = precision._reducer.process_group
    work = all_reduce(group, bucket.buffer().div_(group.size()))
    return work.get_future().then(lambda done: done.value()[0])


@breaks("ddp/mixed-precision/reduce-dtype", says=r"backward issued .*float16")
class ReducesInThePrecisionOfTheParameters(DDPMutant):
    """Gradients travel as autograd gave them, whatever reduce_dtype is."""

    patched = instead(MixedPrecision, "reduce_hook", _reduce_as_it_is)


@breaks("ddp/mixed-precision/replaced-data", says="the parameter is .* from what it should be")
class KeepsTheFirstData(DDPMutant):
    """Data that are put in the place of a parameter's are lost."""

    patched = instead(_Precisions, "_take_in", lambda self: None)


@breaks("ddp/mixed-precision/replaced-data", says="the parameter is .* from what it should be")
class LosesWhatIsWrittenInLowPrecision(DDPMutant):
    """What is written to a parameter while it is in low precision does not outlive that."""

    patched = beforehand(
        _Precisions, "_take_in", lambda self: setattr(self, "version", self.param._version)
    )
