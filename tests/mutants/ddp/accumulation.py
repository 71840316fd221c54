"""DDP that is wrong about backward passes of an unusual kind, and about static graphs."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import torch

from impl.ddp.buckets.bucket import Bucket
from impl.ddp.iteration import autograd_hooks, reduction
from impl.ddp.iteration.grad_copy import GradientCopier
from impl.ddp.iteration.progress import ReducerEvent
from impl.ddp.iteration.reducer import Reducer
from impl.ddp.iteration.reduction import BucketReduction
from impl.ddp.iteration.static_graph import Phase, StaticGraph
from impl.ddp.wrapper import api
from impl.ddp.wrapper.api import DistributedDataParallel
from impl.ddp.wrapper.controls import WrapperControls
from impl.ddp.wrapper.outputs import find_tensors
from tests.mutants.ddp.kit import DDPFault, afterwards, beforehand, instead, swap, together
from tests.mutants.kit import breaks


def _forget(reducer: Reducer) -> None:
    for param in reducer.params:
        param.grad = None


# ---- accumulation


@breaks("ddp/no-sync/first", says="gradient of .* in step 1")
class BeginsWithTheFirstSynchronisedPass(DDPFault):
    """What was added up before it is dropped."""

    patched = afterwards(
        Reducer,
        "prepare_for_backward",
        lambda self, *_: _forget(self) if self.iteration == 1 else None,
    )


@breaks("ddp/no-sync/bucket-views", says="gradient of .* in step 1")
class DividesWhatItCopiesAlone(DDPFault):
    """A gradient that lives in its bucket already is not divided."""

    patched = swap(
        GradientCopier,
        "_scale",
        lambda right: (
            lambda self, slots, copied, resident, divisor: (
                right(self, slots, copied, resident, divisor) if copied else None
            )
        ),
    )


@breaks("ddp/no-sync/comm-hook", says="calls and gradient")
class HooksSeeTheLastPassAlone(DDPFault):
    patched = afterwards(
        Reducer,
        "prepare_for_backward",
        lambda self, *_: _forget(self) if self._reduction.hook is not None else None,
    )


# ---- backward


def _detach(at_least: int) -> Any:
    """Results of buckets of so many parameters lose their history."""

    def then(reduction: BucketReduction, bucket: Bucket) -> None:
        for param in bucket.params:
            if param.grad is not None and len(bucket.params) >= at_least:
                param.grad = param.grad.detach()

    return afterwards(BucketReduction, "deliver", then)


@breaks("ddp/backward/create-graph", says="can be differentiated: rank 0 is wrong")
class GradientsHaveNoHistory(DDPFault):
    patched = _detach(at_least=1)


@breaks(
    "ddp/backward/create-graph-of-several-parameters",
    says="can be differentiated: rank 0 is wrong",
)
class GradientsOfLargeBucketsHaveNoHistory(DDPFault):
    patched = _detach(at_least=2)


@breaks("ddp/backward/in-eval-mode", says="gradient of step 1")
class TrainsInTrainingModeAlone(DDPFault):
    """What a module in eval mode returns leads to no backward."""

    patched = swap(
        DistributedDataParallel,
        "_expect_backward",
        lambda right: lambda self, output: right(self, output) if self.module.training else output,
    )


@breaks("ddp/backward/another-thread", says="gradient of step 1")
class ListensToTheThreadOfForward(DDPFault):
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
class DividesGradientsOfInputs(DDPFault):
    patched = beforehand(DistributedDataParallel, "forward", _average_inputs)


def _rename_errors(right: Any) -> Any:
    def backward(*args: Any, **kwargs: Any) -> Any:
        try:
            return right(*args, **kwargs)
        except ArithmeticError as error:
            raise RuntimeError("backward failed") from error

    return backward


@breaks("ddp/backward/error-in-backward", says="raised RuntimeError: backward failed")
class BackwardFailsInItsOwnWay(DDPFault):
    patched = swap(torch.autograd, "backward", _rename_errors)


def _or_its_own(right: Any) -> Any:
    def result_of(bucket: Any, **options: Any) -> Any:
        try:
            return right(bucket, **options)
        except RuntimeError:
            return bucket.buffer

    return result_of


@breaks("ddp/backward/lost-rank", says="rank 0 was to raise RuntimeError, and it returned")
class GoesOnWithItsOwnGradients(DDPFault):
    """A bucket that cannot be exchanged stays what this rank has filled it with."""

    patched = swap(reduction, "result_of", _or_its_own)


@breaks("ddp/backward/two-wrappers", says="module 0, step 1")
class TheLatestForwardCounts(DDPFault):
    """Only the wrapper that ran forward last hears of gradients."""

    latest: ClassVar[Any] = None

    @staticmethod
    def _note(reducer: Any, *_: Any) -> None:
        TheLatestForwardCounts.latest = reducer

    @staticmethod
    def _if_latest(right: Any) -> Any:
        def arrived(self: Any) -> None:
            if self is not TheLatestForwardCounts.latest:
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
class DividesInHooksThatStay(DDPFault):
    """Hooks of the parameters divide, and outlive the wrapper."""

    patched = together(
        afterwards(Reducer, "__init__", _divide_in_tensor_hooks),
        instead(BucketReduction, "_divisor", lambda self: None),
    )


def _defined_alone(right: Any) -> Any:
    def hook_for(*args: Any) -> Any:
        count = right(*args)
        return lambda inputs, grads: None if grads[0] is None else count(inputs, grads)

    return hook_for


@breaks("ddp/unused/undefined-gradient", says="Expected to have finished reduction")
class WaitsForDefinedGradients(DDPFault):
    patched = swap(autograd_hooks, "_counting_hook", _defined_alone)


# ---- static graphs


@breaks(
    "ddp/static-graph/no-sync-later", says="raised RuntimeError: Your training graph has changed"
)
class CountsHooksOfEveryPass(DDPFault):
    """Hooks count down outside of synchronised passes too."""

    @staticmethod
    def _count(reducer: Any, index: int, delivered: bool) -> None:
        static = reducer._static
        if static is not None and not static.recording and not reducer._progress.is_expecting:
            static.is_final(index)

    patched = beforehand(Reducer, "gradient_accumulated", _count)


@breaks("ddp/static-graph/set-in-time", says="was to raise")
class AnyTimeIsInTime(DDPFault):
    patched = beforehand(
        Reducer, "_set_static_graph", lambda self: setattr(self._statistics, "iteration", 0)
    )


def _silently(right: Any) -> Any:
    def set_static_graph(self: Any) -> None:
        seen = self.find_unused_parameters
        self.find_unused_parameters = False
        if not self.static_graph:
            right(self)
        self.find_unused_parameters = seen

    return set_static_graph


@breaks("ddp/static-graph/warnings", says="'no need to set it again' is not in")
class SaysNothingOfNeedlessSettings(DDPFault):
    patched = swap(WrapperControls, "_set_static_graph", _silently)


def _end_with_what_was_found(static: Any) -> Any:
    static.phase = Phase.REPLAYING
    static._counts = [int(index not in static.unused) for index in range(len(static._counts))]
    return static.unused


@breaks("ddp/static-graph/output-left-out", says="Expected to have finished reduction")
class SearchesFromEveryOutput(DDPFault):
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


def _no_dataclasses(right: Any) -> Any:
    return lambda output: [] if hasattr(output, "__dataclass_fields__") else right(output)


@breaks(
    "ddp/dataclass-output-of-a-static-graph", says="gradient of a.weight in step 1: rank 0 is wrong"
)
class RecordsFromOutputsAlone(DDPFault):
    """The end of a first backward pass is waited for at outputs, and dataclasses have none."""

    @staticmethod
    def _once_reached(right: Any) -> Any:
        def queue(self: Any) -> None:
            if getattr(self, "outputs_are_reached", False):
                right(self)

        return queue

    patched = together(
        swap(api, "find_tensors", _no_dataclasses),
        beforehand(
            Reducer,
            "backward_begins",
            lambda self, *_: setattr(self, "outputs_are_reached", True),
        ),
        swap(Reducer, "_queue_delayed_all_reduce", _once_reached),
    )


@breaks("ddp/output-that-is-no-container", says="gradients: rank 0 is wrong")
class ExpectsNothingWithoutOutputs(DDPFault):
    """Where it finds no output it expects no backward pass."""

    @staticmethod
    def _if_any(right: Any) -> Any:
        def expect(self: Any, output: Any) -> Any:
            return right(self, output) if list(find_tensors(output)) else output

        return expect

    patched = swap(DistributedDataParallel, "_expect_backward", _if_any)


@breaks("ddp/update-group/after-an-unfinished-step", says="Expected to have finished reduction")
class ChangesGroupsBetweenStepsAlone(DDPFault):
    patched = beforehand(Reducer, "_reset_state", lambda self: self._check_reducer_finalized())


@breaks(
    "ddp/update-group/after-an-error-in-backward",
    says="Encountered gradient which is undefined",
)
class RemembersWhatTheFailedPassUsed(DDPFault):
    @staticmethod
    def _mark(reducer: Reducer) -> None:
        for index in range(len(reducer.params)):
            if reducer._reduction.used is not None:
                reducer._reduction.used.mark(index)

    patched = afterwards(Reducer, "_reset_state", _mark)
