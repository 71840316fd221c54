"""DDP that is wrong about parameters without a part in the loss, and about accumulation."""

from __future__ import annotations

import contextlib
from typing import Any

import torch.distributed as dist

from conformance.verdict import Verdict
from impl.ddp.iteration import reducer
from impl.ddp.iteration.progress import ReducerEvent
from impl.ddp.iteration.readiness import Readiness, ReadyTwiceError
from impl.ddp.iteration.reducer import Reducer
from impl.ddp.iteration.reduction import BucketReduction
from impl.ddp.iteration.static_graph import StaticGraph
from impl.ddp.iteration.used_map import UsedMap
from impl.ddp.wrapper import api
from impl.ddp.wrapper.api import DistributedDataParallel
from tests.mutants.ddp.kit import DDPFault, afterwards, instead, swap
from tests.mutants.kit import breaks


@breaks("ddp/unused/everywhere", says="has one, and nobody used it")
class ZerosForUnusedParameters(DDPFault):
    patched = instead(UsedMap, "unused_everywhere", lambda self, index: False)


@breaks("ddp/unused/accumulated-gradient-is-kept", says="another tensor|the gradient is now")
class AveragesOldGradients(DDPFault):
    patched = instead(UsedMap, "unused_everywhere", lambda self, index: False)


@breaks("ddp/unused/somewhere", says="gradient of .* is wrong")
class KeepsToWhatItUsedItself(DDPFault):
    patched = instead(UsedMap, "unused_everywhere", lambda self, index: not self._used[index])


@breaks("ddp/unused/another-graph-each-step", says="gradient of|has one|raised")
class RemembersWhatWasUsed(DDPFault):
    patched = instead(UsedMap, "clear", lambda self: None)


@breaks("ddp/unused/nothing-used-on-a-rank", says="went on", verdict=Verdict.TIMEOUT)
class WaitsForHooks(DDPFault):
    @staticmethod
    def _mark(right: Any) -> Any:
        def mark(self: Any) -> None:
            if len(self.unused_params) < len(self.params):
                right(self)

        return mark

    patched = swap(Reducer, "_mark_unused_once", _mark)


@breaks("ddp/unused/output-left-out", says="Expected to have finished reduction")
class NeedsEveryOutput(DDPFault):
    patched = instead(api, "pass_through", lambda output, clone: output)


def _define(reduction: BucketReduction, bucket: Any) -> None:
    for param, view in zip(bucket.params, bucket.views, strict=True):
        if param.grad is None:
            param.grad = view


@breaks("ddp/unused/bucket-views", says="has one, and nobody used it")
class EveryViewIsAGradient(DDPFault):
    patched = afterwards(BucketReduction, "deliver", _define)


@breaks("ddp/unused/bucket-views", says="which gradients there are: rank 0 is wrong")
class GradientsBeginAsViews(DDPFault):
    """The constructor makes every gradient a view of its bucket, used or not."""

    @staticmethod
    def _define(reducer: Reducer, *_: Any, **__: Any) -> None:
        if reducer.gradient_as_bucket_view:
            for bucket in reducer.buckets:
                for param, view in zip(bucket.params, bucket.views, strict=True):
                    param.grad = view

    patched = afterwards(Reducer, "__init__", _define)


@breaks("ddp/unused/kept-from-step-to-step", says=r"is wrong|has one|differ")
class UnusedGradientsBeginAgain(DDPFault):
    @staticmethod
    def _drop(reducer: Reducer, *_: Any) -> None:
        for index in reducer.unused_params:
            reducer.params[index].grad = None

    patched = afterwards(Reducer, "prepare_for_backward", _drop)


@breaks("ddp/unused/skipped-buckets", says="buckets: rank 0 is wrong")
class SkipsNoBucket(DDPFault):
    patched = instead(Reducer, "_choose_skipped", lambda self: None)


@breaks("ddp/unused/error-without-search", says="is not in ''")
class SaysNothingOfMissingGradients(DDPFault):
    patched = instead(
        Reducer, "_check_reducer_finalized", lambda self: setattr(self, "_final_order", [])
    )


@breaks("ddp/unused/error-with-names", says="named are")
class NamesNoParameter(DDPFault):
    patched = instead(reducer, "debug_is_on", lambda: False)


@breaks("ddp/unused/error-again", says="forward 3 said ''")
class ComplainsOnce(DDPFault):
    @staticmethod
    def _check(right: Any) -> Any:
        def check(self: Any) -> None:
            try:
                right(self)
            finally:
                self._progress.on(ReducerEvent.DROPPED)
                self._final_order = []

        return check

    patched = swap(Reducer, "_check_reducer_finalized", _check)


@breaks("ddp/backward/several-forwards", says="Expected to have finished reduction")
@breaks("ddp/unused/forward-without-backward", says="Expected to have finished reduction")
class WantsABackwardForEachForward(DDPFault):
    patched = afterwards(
        Reducer,
        "prepare_for_backward",
        lambda it, *_: it._progress.on(ReducerEvent.FOUND_INCOMPLETE),
    )


def _mark_leniently(right: Any) -> Any:
    def mark(self: Readiness, indices: Any) -> Any:
        with contextlib.suppress(ReadyTwiceError):
            return right(self, indices)
        return []

    return mark


@breaks("ddp/unused/ready-twice", says="was to raise")
class ToleratesSecondMarks(DDPFault):
    patched = swap(Readiness, "mark", _mark_leniently)


@breaks("ddp/unused/needless-search-is-said", says="if it was not")
class CallsEveryGraphStatic(DDPFault):
    patched = instead(Reducer, "_ddp_graph_static", lambda self: True)


# ---- accumulation


@breaks("ddp/no-sync/silent", says="collectives of each pass")
class SynchronisesAlways(DDPFault):
    patched = instead(DistributedDataParallel, "no_sync", lambda self: contextlib.nullcontext())


@contextlib.contextmanager
def _no_sync(ddp: Any) -> Any:
    ddp.require_backward_grad_sync = False
    try:
        yield
    finally:
        ddp.require_backward_grad_sync = True


@breaks("ddp/no-sync/nested", says="collectives of each pass")
class NoSyncEndsWithTheInnerOne(DDPFault):
    patched = instead(DistributedDataParallel, "no_sync", _no_sync)


def _forget(reducer: Reducer, *_: Any) -> None:
    for param in reducer.params:
        param.grad = None


@breaks("ddp/no-sync/accumulates", says="gradient of .* in step 1")
class ForgetsWhatWasAddedUp(DDPFault):
    patched = afterwards(Reducer, "prepare_for_backward", _forget)


@breaks("ddp/backward/without-zero-grad", says="gradient of .* in step 1")
class EachBackwardBeginsAgain(DDPFault):
    patched = afterwards(Reducer, "prepare_for_backward", _forget)


@breaks("ddp/gradients/given-beforehand", says="gradient: rank 0 is wrong")
class IgnoresGivenGradients(DDPFault):
    patched = afterwards(Reducer, "prepare_for_backward", _forget)


@breaks("ddp/no-sync/every-parameter", says="gradient of|has one")
class SynchronisesWhatTheLastPassUsed(DDPFault):
    @staticmethod
    def _clear(reducer: Reducer) -> None:
        if reducer._reduction.used is not None:
            reducer._reduction.used.clear()

    patched = afterwards(Reducer, "_expect_backward", _clear)


@breaks("ddp/backward/several-forwards-then-several-backwards", says="gradient of step 1")
class OneBackwardForAllForwards(DDPFault):
    patched = instead(Reducer, "backward_begins", lambda self, unused=None: None)


@breaks("ddp/backward/retained-graph", says="gradient of step 1")
class OneBackwardForEachForward(DDPFault):
    patched = instead(Reducer, "backward_begins", lambda self, unused=None: None)


def _average_everywhere(reducer: Reducer, *_: Any) -> None:
    def average(grad: Any) -> Any:
        grad = grad.clone()
        dist.all_reduce(grad, group=reducer.process_group)
        return grad / reducer.process_group.size()

    for param in reducer.params:
        param.register_hook(average)


@breaks("ddp/backward/autograd-grad-is-local", says="autograd.grad returned")
class AveragesInHooksOfTensors(DDPFault):
    patched = afterwards(Reducer, "_install_hooks", _average_everywhere)


@breaks("ddp/backward/removed-hooks", says="the gradient is")
class HooksStay(DDPFault):
    patched = instead(Reducer, "_remove_autograd_hooks", lambda self: None)


@breaks("ddp/backward/zero-grad", says="gradient of")
class AddsToZeroedGradients(DDPFault):
    """Gradients that were zeroed, and not dropped, come back once more."""

    @staticmethod
    def _twice(reduction: BucketReduction, bucket: Any) -> None:
        for param in bucket.params:
            if param.grad is not None and hasattr(param, "_seen"):
                param.grad.mul_(2)
            param._seen = True

    patched = afterwards(BucketReduction, "deliver", _twice)


# ---- static graphs


def _do_not_reduce(reducer: Reducer) -> None:
    assert reducer._static is not None
    reducer.unused_params = reducer._static.end_recording()
    reducer._progress.on(ReducerEvent.DROPPED)


@breaks("ddp/static-graph/values", says="gradient of .* in step 1")
class FirstStepStaysLocal(DDPFault):
    patched = instead(Reducer, "_delay_all_reduce", _do_not_reduce)


@breaks("ddp/static-graph/used-then-unused", says="was to raise")
class DoesNotMissGradients(DDPFault):
    patched = instead(Reducer, "_check_reducer_finalized", lambda self: None)


@breaks("ddp/static-graph/unused-then-used", says="does not match|was to raise")
class DoesNotCountHooks(DDPFault):
    patched = instead(StaticGraph, "is_final", lambda self, index: True)


@breaks("ddp/static-graph/used-several-times", says="Expected to have finished reduction")
class CountsHooksTwice(DDPFault):
    patched = swap(
        StaticGraph, "record", lambda right: lambda self, i: (right(self, i), right(self, i))[0]
    )


@breaks("ddp/static-graph/unused-parameters", says="Expected to have finished|raised")
class ExpectsAllParameters(DDPFault):
    patched = swap(StaticGraph, "end_recording", lambda right: lambda self: (right(self), [])[1])
