"""Mutants of conformance/spec/comm_hooks/hooks.py."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from impl.ddp.buckets.bucket import GradBucket
from impl.ddp.iteration import reduction
from impl.ddp.iteration.grad_copy import GradientCopier
from impl.ddp.iteration.reducer import Reducer
from impl.ddp.iteration.reduction import BucketReduction
from tests.mutants.ddp.kit import DDPMutant, beforehand, instead, swap, together
from tests.mutants.kit import breaks


@breaks("comm_hooks/called-for-each-bucket", says=r"calls of step \d|the state: rank 0 is wrong")
class CallsTheHookTwice(DDPMutant):
    patched = swap(
        BucketReduction,
        "run_hook",
        lambda right: lambda *args: (right(*args).wait(), right(*args))[1],
    )


@breaks("comm_hooks/called-for-each-bucket", says="'NoneType' object has no attribute 'append'")
class TakesAnEmptyStateForNone(DDPMutant):
    patched = swap(
        BucketReduction,
        "set_hook",
        lambda right: lambda self, state, *args, **how: right(self, state or None, *args, **how),
    )


@breaks("comm_hooks/gradients-are-not-divided", says="gradient on rank")
@breaks("comm_hooks/library/zero", says="parameter 0")
class DividesBeforeTheHook(DDPMutant):
    patched = instead(BucketReduction, "_divisor", lambda self: self.group.size())


def _divided(right: Any) -> Any:
    def fill_one(self: Any, param: Any, view: Any) -> None:
        right(self, param, view)
        view.div_(self.group.size())

    return fill_one


@breaks("comm_hooks/gradients-are-not-divided", says="gradient on rank")
class DividesLargeGradientsBeforeTheHook(DDPMutant):
    patched = swap(BucketReduction, "fill_one", _divided)


@breaks("comm_hooks/bucket/index", says=r"calls of step \d")
class CountsBucketsFromOne(DDPMutant):
    patched = swap(GradBucket, "index", lambda right: lambda self: right(self) + 1)


@breaks("comm_hooks/bucket/is-last", says=r"calls of step \d")
class TheFirstBucketIsTheLast(DDPMutant):
    patched = instead(GradBucket, "is_last", lambda self: self.index() == 0)


def _without_counting(right: Any) -> Any:
    def delay_all_reduce(self: Any) -> None:
        with mock.patch.object(GradBucket, "index", return_value=0):
            right(self)

    return delay_all_reduce


@breaks("comm_hooks/bucket/index-of-a-static-graph", says="calls of step 1")
class CountsNoBucketsInTheFirstStepOfAStaticGraph(DDPMutant):
    patched = swap(Reducer, "_finish_first_static_backward", _without_counting)


@breaks("comm_hooks/bucket/buffer", says="not the flat gradients")
class BuffersAreMatrices(DDPMutant):
    patched = swap(GradBucket, "buffer", lambda right: lambda self: right(self).view(1, -1))


@breaks("comm_hooks/bucket/gradients", says="same memory")
class GradientsAreCopies(DDPMutant):
    patched = swap(
        GradBucket, "gradients", lambda right: lambda self: [grad.clone() for grad in right(self)]
    )


@breaks("comm_hooks/bucket/set-buffer", says="buffer: rank 0 is wrong")
class BuffersCannotBeSet(DDPMutant):
    patched = instead(GradBucket, "set_buffer", lambda self, buffer: None)


@breaks("comm_hooks/bucket/gradients-of-channels-last", says="gradient: rank 0 is wrong")
class GradientsInMemoryOrder(DDPMutant):
    patched = beforehand(
        GradBucket, "gradients", lambda self: setattr(self, "_gradients_in_memory_order", True)
    )


@breaks("comm_hooks/bucket/complex", says="gradient: rank 0 is wrong|raised")
class ComplexResultsAreHalved(DDPMutant):
    @staticmethod
    def _half(right: Any) -> Any:
        def result_of(bucket: Any, **options: Any) -> Any:
            result = right(bucket, **options).clone()
            if any(param.is_complex() for param in bucket.params):
                result[1::2] = 0
            return result

        return result_of

    patched = swap(reduction, "result_of", _half)


def _ignoring(right: Any) -> Any:
    def result_of(bucket: Any, **options: Any) -> Any:
        right(bucket, **options)
        return bucket.buffer

    return result_of


@breaks("comm_hooks/result", says="gradients: rank 0 is wrong")
class IgnoresTheResult(DDPMutant):
    patched = swap(reduction, "result_of", _ignoring)


@breaks("comm_hooks/result-in-later-steps", says="gradients: rank 0 is wrong")
class TakesTheFirstResultAgain(DDPMutant):
    @staticmethod
    def _first(right: Any) -> Any:
        kept: dict[int, Any] = {}

        def result_of(bucket: Any, **options: Any) -> Any:
            result = right(bucket, **options)
            return kept.setdefault(result.numel(), result)

        return result_of

    patched = swap(reduction, "result_of", _first)


@breaks("comm_hooks/future-is-awaited", says="gradients: rank 0 is wrong")
class DoesNotWait(DDPMutant):
    @staticmethod
    def _hasty(right: Any) -> Any:
        def result_of(bucket: Any, **options: Any) -> Any:
            return right(bucket, **options) if bucket.future.done() else bucket.buffer

        return result_of

    patched = swap(reduction, "result_of", _hasty)


def _waits_for_the_last(right: Any) -> Any:
    def result_of(bucket: Any, **options: Any) -> Any:
        return right(bucket, **options) if bucket.future.done() else bucket.buffer

    return result_of


@breaks("comm_hooks/future-is-awaited", says="gradients: rank 0 is wrong")
class TakesFuturesForComplete(DDPMutant):
    """What is not complete when the last bucket's future is awaited is left out."""

    @staticmethod
    def _last(reducer: Any) -> None:
        reducer.buckets[-1].future.wait()

    patched = together(
        beforehand(Reducer, "_deliver", _last), swap(reduction, "result_of", _waits_for_the_last)
    )


def _from_the_beginning(buffer: Any, layout: Any) -> list[Any]:
    return [buffer.as_strided(slot.shape, slot.strides, slot.offset) for slot in layout.slots]


@breaks("comm_hooks/result-inside-another-tensor", says="gradients: rank 0 is wrong")
class ReadsResultsFromTheBeginning(DDPMutant):
    """A result is read from where its storage begins."""

    patched = instead(reduction, "view_gradients", _from_the_beginning)


def _strict(right: Any) -> Any:
    def result_of(bucket: Any, **options: Any) -> Any:
        result = right(bucket, **options)
        if result.dtype != bucket.buffer.dtype:
            raise RuntimeError(f"a result in {result.dtype}")
        return result

    return result_of


@breaks("comm_hooks/result-of-another-dtype", says=r"a result in torch\.float16")
class WantsTheBucketsDtype(DDPMutant):
    patched = swap(reduction, "result_of", _strict)


def _leaves_what_was_there(right: Any) -> Any:
    def copy(self: Any, slots: Any, divisor: Any) -> None:
        absent = [
            (view, view.clone())
            for param, view in zip(slots.params, slots.views, strict=True)
            if param.grad is None
        ]
        right(self, slots, divisor)
        for view, before in absent:
            view.copy_(before)

    return copy


@breaks("comm_hooks/bucket/unused-parameters", says="step 2: not zeros for")
class LeavesOldGradientsInBuckets(DDPMutant):
    """The slot of a parameter that went unused holds what an earlier step left there."""

    patched = swap(GradientCopier, "_copy_odd_ones_in", _leaves_what_was_there)


@breaks("comm_hooks/unused-everywhere", says="gradients: rank 0 is wrong")
class HooksAreForEveryParameter(DDPMutant):
    """What a hook returns goes to all parameters of the bucket, used or not."""

    patched = swap(
        BucketReduction,
        "_gets_no_gradient",
        lambda right: lambda self, index: self.hook is None and right(self, index),
    )


@breaks("comm_hooks/then", says="gradients: rank 0 is wrong")
class ThenChangesNothing(DDPMutant):
    """What a callback returns is dropped: the chained future is the first one."""

    patched = swap(
        torch.futures.Future, "then", lambda right: lambda self, call: (right(self, call), self)[1]
    )


def _once_a_bucket(right: Any) -> Any:
    def run_hook(hook: Any, state: Any, bucket: Any) -> Any:
        all_reduce, calls = dist.all_reduce, [0]

        def counted(*args: Any, **how: Any) -> Any:
            calls[0] += 1
            if calls[0] > 1:
                raise RuntimeError("a second collective in one hook")
            return all_reduce(*args, **how)

        with mock.patch.object(dist, "all_reduce", counted):
            return right(hook, state, bucket)

    return run_hook


@breaks("comm_hooks/several-collectives", says="RuntimeError: a second collective in one hook")
class OneCollectiveForEachBucket(DDPMutant):
    patched = swap(reduction, "run_hook", _once_a_bucket)
