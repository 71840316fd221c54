"""Mutants of conformance/spec/ddp/accumulation.py."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from impl.ddp.buckets.bucket import Bucket
from impl.ddp.iteration import reduction
from impl.ddp.iteration.progress import ReducerEvent
from impl.ddp.iteration.reducer import Reducer
from impl.ddp.iteration.reduction import BucketReduction
from impl.ddp.wrapper.api import DistributedDataParallel
from tests.mutants.ddp.kit import DDPMutant, afterwards, beforehand, forget, instead, swap, together
from tests.mutants.kit import breaks


def _detach(at_least: int) -> Any:
    """Results of buckets of so many parameters lose their history."""

    def then(reduction: BucketReduction, bucket: Bucket) -> None:
        for param in bucket.params:
            if param.grad is not None and len(bucket.params) >= at_least:
                param.grad = param.grad.detach()

    return afterwards(BucketReduction, "deliver", then)


@breaks("ddp/backward/create-graph", says="can be differentiated: rank 0 is wrong")
class GradientsHaveNoHistory(DDPMutant):
    patched = _detach(at_least=1)


@breaks(
    "ddp/backward/create-graph-of-several-parameters",
    says="can be differentiated: rank 0 is wrong",
)
class GradientsOfLargeBucketsHaveNoHistory(DDPMutant):
    patched = _detach(at_least=2)


@breaks("ddp/backward/in-eval-mode", says="gradient of step 1")
class TrainsInTrainingModeAlone(DDPMutant):
    """What a module in eval mode returns leads to no backward."""

    patched = swap(
        DistributedDataParallel,
        "_expect_backward",
        lambda right: lambda self, output: right(self, output) if self.module.training else output,
    )


@breaks("ddp/backward/another-thread", says="gradient of step 1")
class IgnoresBackwardInAnotherThread(DDPMutant):
    """Backward in another thread is none of its business."""

    @staticmethod
    def _here_alone(right: Any) -> Any:
        def begins(self: Any, unused: Any = None) -> None:
            if threading.get_ident() == self.thread_of_forward:
                right(self, unused)
            else:
                self._progress.on(ReducerEvent.DROPPED)

        return begins

    patched = together(
        beforehand(
            Reducer,
            "prepare_for_backward",
            lambda self, *_: setattr(self, "thread_of_forward", threading.get_ident()),
        ),
        swap(Reducer, "backward_begins", _here_alone),
    )


def _average_inputs(ddp: Any, *inputs: Any) -> None:
    for x in inputs:
        if isinstance(x, torch.Tensor) and x.requires_grad:
            x.register_hook(lambda grad: grad / ddp.process_group.size())


@breaks("ddp/backward/input-gradient", says="gradient of rank 0's input")
class DividesGradientsOfInputs(DDPMutant):
    patched = beforehand(DistributedDataParallel, "forward", _average_inputs)


def _rename_errors(right: Any) -> Any:
    def backward(*args: Any, **kwargs: Any) -> Any:
        try:
            return right(*args, **kwargs)
        except ArithmeticError as error:
            raise RuntimeError("backward failed") from error

    return backward


@breaks("ddp/backward/error-in-backward", says="raised RuntimeError: backward failed")
class BackwardRaisesAnotherError(DDPMutant):
    patched = swap(torch.autograd, "backward", _rename_errors)


def _or_its_own(right: Any) -> Any:
    def result_of(bucket: Any, **options: Any) -> Any:
        try:
            return right(bucket, **options)
        except RuntimeError:
            return bucket.buffer

    return result_of


@breaks("ddp/backward/lost-rank", says="rank 0 was to raise RuntimeError, and it returned")
class GoesOnWithItsOwnGradients(DDPMutant):
    """If a bucket cannot be reduced, this rank continues with its own gradients."""

    patched = swap(reduction, "result_of", _or_its_own)


@breaks("ddp/backward/two-wrappers", says="module 0, step 1")
class OnlyTheLatestWrapperAverages(DDPMutant):
    """Only the wrapper that ran forward last hears of gradients."""

    latest: ClassVar[Any] = None

    @staticmethod
    def _note(reducer: Any, *_: Any) -> None:
        OnlyTheLatestWrapperAverages.latest = reducer

    @staticmethod
    def _if_latest(right: Any) -> Any:
        def arrived(self: Any) -> None:
            if self is not OnlyTheLatestWrapperAverages.latest:
                self._progress.on(ReducerEvent.DROPPED)
            right(self)

        return arrived

    patched = together(
        beforehand(Reducer, "prepare_for_backward", _note),
        swap(Reducer, "gradients_arrived", _if_latest),
    )


def _divide_in_tensor_hooks(reducer: Reducer, *_: Any) -> None:
    n = reducer.process_group.size()
    for param in reducer.params:
        param.register_hook(lambda grad: grad / n)


@breaks("ddp/backward/wrapped-again", says="gradient: rank 0 is wrong")
class HooksOutliveTheWrapper(DDPMutant):
    """Hooks of the parameters divide, and outlive the wrapper."""

    patched = together(
        afterwards(Reducer, "__init__", _divide_in_tensor_hooks),
        instead(BucketReduction, "_divisor", lambda self: None),
    )


@breaks("ddp/backward/several-forwards", says="Expected to have finished reduction")
@breaks("ddp/unused/forward-without-backward", says="Expected to have finished reduction")
class WantsABackwardForEachForward(DDPMutant):
    patched = afterwards(
        Reducer,
        "prepare_for_backward",
        lambda it, *_: it._progress.on(ReducerEvent.FOUND_INCOMPLETE),
    )


@breaks("ddp/backward/without-zero-grad", says="gradient of .* in step 1")
class EachBackwardBeginsAgain(DDPMutant):
    patched = afterwards(Reducer, "prepare_for_backward", forget)


@breaks("ddp/backward/several-forwards-then-several-backwards", says="gradient of step 1")
@breaks("ddp/backward/retained-graph", says="gradient of step 1")
class NoticesNoFurtherBackward(DDPMutant):
    patched = instead(Reducer, "backward_begins", lambda self, unused=None: None)


def _average_everywhere(reducer: Reducer, *_: Any) -> None:
    def average(grad: Any) -> Any:
        grad = grad.clone()
        dist.all_reduce(grad, group=reducer.process_group)
        return grad / reducer.process_group.size()

    for param in reducer.params:
        param.register_hook(average)


@breaks("ddp/backward/autograd-grad-is-local", says="autograd.grad returned")
class AveragesInHooksOfTensors(DDPMutant):
    patched = afterwards(Reducer, "_install_hooks", _average_everywhere)


@breaks("ddp/backward/removed-hooks", says="the gradient is")
class HooksStay(DDPMutant):
    patched = instead(Reducer, "_remove_autograd_hooks", lambda self: None)


@breaks("ddp/backward/zero-grad", says="gradient of")
class AddsToZeroedGradients(DDPMutant):
    """Gradients that were zeroed, and not dropped, come back once more."""

    @staticmethod
    def _twice(reduction: BucketReduction, bucket: Any) -> None:
        for param in bucket.params:
            if param.grad is not None and hasattr(param, "_seen"):
                param.grad.mul_(2)
            param._seen = True

    patched = afterwards(BucketReduction, "deliver", _twice)
