"""Mutants of conformance/spec/ddp/static_graph.py."""

from __future__ import annotations

from typing import Any, ClassVar

from impl.ddp.buckets.bucket import Bucket
from impl.ddp.iteration.progress import ReducerEvent
from impl.ddp.iteration.reducer import Reducer
from impl.ddp.iteration.reduction import BucketReduction
from impl.ddp.iteration.static_graph import StaticGraph
from impl.ddp.wrapper.api import DistributedDataParallel
from impl.ddp.wrapper.wrapper_methods import WrapperControls
from tests.mutants.ddp.kit import DDPMutant, afterwards, beforehand, instead, swap, together
from tests.mutants.kit import breaks


@breaks(
    "ddp/static-graph/no-sync-later", says="raised RuntimeError: Your training graph has changed"
)
class CountsHooksOfEveryPass(DDPMutant):
    """Hooks count down outside of synchronised passes too."""

    @staticmethod
    def _count(reducer: Any, index: int, delivered: bool) -> None:
        static = reducer._static
        if static is not None and not static.recording and not reducer._progress.is_expecting:
            static.is_final(index)

    patched = beforehand(Reducer, "gradient_accumulated", _count)


@breaks("ddp/static-graph/set-in-time", says="was to raise")
class TakesAStaticGraphAtAnyTime(DDPMutant):
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
class SaysNothingOfNeedlessSettings(DDPMutant):
    patched = swap(WrapperControls, "_set_static_graph", _silently)


def _end_recording(ddp: DistributedDataParallel) -> None:
    if ddp.reducer._static is not None:
        ddp.reducer._static.end_recording()


@breaks("ddp/static-graph/no-sync-first", says="training graph has changed")
class TakesNoSyncForTheFirstStep(DDPMutant):
    patched = beforehand(DistributedDataParallel, "no_sync", _end_recording)


def _do_not_reduce(reducer: Reducer) -> None:
    assert reducer._static is not None
    reducer.unused_params = reducer._static.end_recording()
    reducer._progress.on(ReducerEvent.DROPPED)


@breaks("ddp/static-graph/values", says="gradient of .* in step 1")
class FirstStepStaysLocal(DDPMutant):
    patched = instead(Reducer, "_finish_first_static_backward", _do_not_reduce)


@breaks("ddp/static-graph/used-then-unused", says="was to raise")
class DoesNotMissGradients(DDPMutant):
    patched = instead(Reducer, "_check_reducer_finalized", lambda self: None)


@breaks("ddp/static-graph/unused-then-used", says="does not match|was to raise")
class DoesNotCountHooks(DDPMutant):
    patched = instead(StaticGraph, "is_final", lambda self, index: True)


@breaks("ddp/static-graph/used-several-times", says="Expected to have finished reduction")
class CountsHooksTwice(DDPMutant):
    patched = swap(
        StaticGraph, "record", lambda right: lambda self, i: (right(self, i), right(self, i))[0]
    )


@breaks("ddp/static-graph/unused-parameters", says="Expected to have finished|raised")
class ExpectsAllParameters(DDPMutant):
    patched = swap(StaticGraph, "end_recording", lambda right: lambda self: (right(self), [])[1])


@breaks("ddp/static-graph/unused-parameters", says=r"gradient of branches\.0\.weight in step 1")
class TakesItsOwnUseForThatOfAll(DDPMutant):
    """What a rank does not use in the first step has no gradient there, whoever else uses it."""

    unused: ClassVar[list[int]] = []

    @staticmethod
    def _noting(right: Any) -> Any:
        def end_recording(self: StaticGraph) -> list[int]:
            TakesItsOwnUseForThatOfAll.unused = right(self)
            return TakesItsOwnUseForThatOfAll.unused

        return end_recording

    @staticmethod
    def _take_back(reduction: BucketReduction, bucket: Bucket) -> None:
        for index, param in zip(bucket.param_indices, bucket.params, strict=True):
            if index in TakesItsOwnUseForThatOfAll.unused:
                param.grad = None

    patched = together(
        swap(StaticGraph, "end_recording", _noting),
        afterwards(BucketReduction, "deliver", _take_back),
    )
