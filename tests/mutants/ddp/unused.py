"""Mutants of conformance/spec/ddp/unused.py."""

from __future__ import annotations

from typing import Any

import torch

from conformance.verdict import Verdict
from impl.ddp.iteration import autograd_hooks, grad_copy
from impl.ddp.iteration.reducer import Reducer
from impl.ddp.iteration.reduction import BucketReduction
from impl.ddp.iteration.static_graph import Phase, StaticGraph
from impl.ddp.iteration.used_map import UsedMap
from impl.ddp.wrapper import api
from impl.ddp.wrapper.api import DistributedDataParallel
from impl.ddp.wrapper.outputs import find_tensors
from tests.mutants.ddp.kit import DDPMutant, afterwards, beforehand, instead, swap, together
from tests.mutants.kit import breaks


@breaks("ddp/unused/strides", says="strides: rank . is wrong")
class NewGradientsAreRowMajor(DDPMutant):
    patched = instead(
        grad_copy,
        "new_gradient",
        lambda param, source: torch.empty(param.shape, dtype=param.dtype).copy_(source),
    )


def _defined_alone(right: Any) -> Any:
    def hook_for(*args: Any) -> Any:
        count = right(*args)
        return lambda inputs, grads: None if grads[0] is None else count(inputs, grads)

    return hook_for


@breaks("ddp/unused/undefined-gradient", says="Expected to have finished reduction")
class WaitsForDefinedGradients(DDPMutant):
    patched = swap(autograd_hooks, "_counting_hook", _defined_alone)


def _end_with_what_was_found(static: Any) -> Any:
    static.phase = Phase.REPLAYING
    static._counts = [int(index not in static.unused) for index in range(len(static._counts))]
    return static.unused


@breaks("ddp/static-graph/output-left-out", says="Expected to have finished reduction")
class SearchesFromEveryOutput(DDPMutant):
    """Unused are the parameters that no output depends on, whatever the loss is made of."""

    @staticmethod
    def _search(ddp: Any, output: Any) -> None:
        reducer = ddp.reducer
        if reducer._static is not None and reducer._static.recording:
            unused = reducer._search.search(list(find_tensors(output)), reducer._hooks.accumulators)
            reducer._static.unused = unused

    patched = together(
        beforehand(DistributedDataParallel, "_expect_backward", _search),
        instead(StaticGraph, "end_recording", _end_with_what_was_found),
    )


@breaks("ddp/unused/everywhere", says="has one, and nobody used it")
@breaks("ddp/unused/accumulated-gradient-is-kept", says="another tensor|the gradient is now")
class ZerosForUnusedParameters(DDPMutant):
    patched = instead(UsedMap, "unused_everywhere", lambda self, index: False)


@breaks("ddp/unused/somewhere", says="gradient of .* is wrong")
class KnowsOnlyItsOwnUsedParameters(DDPMutant):
    patched = instead(UsedMap, "unused_everywhere", lambda self, index: not self._used[index])


@breaks("ddp/unused/another-graph-each-step", says="gradient of|has one|raised")
class RemembersWhatWasUsed(DDPMutant):
    patched = instead(UsedMap, "clear", lambda self: None)


@breaks("ddp/unused/nothing-used-on-a-rank", says="went on", verdict=Verdict.TIMEOUT)
class WaitsForHooks(DDPMutant):
    """A rank whose loss uses no parameter does not mark its parameters as unused."""

    @staticmethod
    def _mark(right: Any) -> Any:
        def mark(self: Any) -> None:
            if len(self.unused_params) < len(self.params):
                right(self)

        return mark

    patched = swap(Reducer, "_mark_unused_once", _mark)


@breaks("ddp/unused/output-left-out", says="Expected to have finished reduction")
class NeedsEveryOutput(DDPMutant):
    patched = instead(api, "pass_through", lambda output, clone: output)


def _define(reduction: BucketReduction, bucket: Any) -> None:
    for param, view in zip(bucket.params, bucket.views, strict=True):
        if param.grad is None:
            param.grad = view


@breaks("ddp/unused/bucket-views", says="has one, and nobody used it")
class EveryViewIsAGradient(DDPMutant):
    patched = afterwards(BucketReduction, "deliver", _define)


@breaks("ddp/unused/bucket-views", says="which gradients there are: rank 0 is wrong")
class GradientsBeginAsViews(DDPMutant):
    """The constructor makes every gradient a view of its bucket, used or not."""

    @staticmethod
    def _define(reducer: Reducer, *_: Any, **__: Any) -> None:
        if reducer.gradient_as_bucket_view:
            for bucket in reducer.buckets:
                for param, view in zip(bucket.params, bucket.views, strict=True):
                    param.grad = view

    patched = afterwards(Reducer, "__init__", _define)


@breaks("ddp/unused/kept-from-step-to-step", says=r"is wrong|has one|differ")
class UnusedGradientsBeginAgain(DDPMutant):
    @staticmethod
    def _drop(reducer: Reducer, *_: Any) -> None:
        for index in reducer.unused_params:
            reducer.params[index].grad = None

    patched = afterwards(Reducer, "prepare_for_backward", _drop)


@breaks("ddp/unused/skipped-buckets", says="buckets: rank 0 is wrong")
class SkipsNoBucket(DDPMutant):
    patched = instead(Reducer, "_choose_skipped", lambda self: None)


@breaks("ddp/unused/needless-search-is-said", says="if it was not")
class CallsEveryGraphStatic(DDPMutant):
    patched = instead(Reducer, "_ddp_graph_static", lambda self: True)
