"""Mutants of conformance/spec/pipeline/stages.py."""

from __future__ import annotations

from typing import Any

import torch

from tests.mutants.kit import breaks
from tests.mutants.pipeline.kit import (
    OF_ONE_STAGE,
    OF_SEVERAL,
    PIPELINING,
    SCHEDULE,
    SCHEDULES,
    STAGE,
    RepairedButOne,
    StageMutant,
    double_gradients,
    params_of,
)
from tests.mutants.replacing import MethodMutant


@breaks("pipeline/several-values", says="gradient of stage 0")
class LosesTheGradientOfTheSecondValue(StageMutant):
    @staticmethod
    def _retrieve_recv_grads(right: Any, self: Any, chunk: int) -> Any:
        grads = right(self, chunk)
        return grads if len(grads) < 2 else (grads[0] * 0, *grads[1:])


@breaks("pipeline/keywords", says="gradient of stage")
class GivesAllMicrobatchesTheFirstKeywords(MethodMutant):
    of = SCHEDULES

    @staticmethod
    def split_args_kwargs_into_chunks(right: Any, *args: Any) -> Any:
        positional, named = right(*args)
        return positional, named[:1] * len(named)


@breaks("pipeline/other-dimension", says="output of GPipe: ")
class MergesByTheFirstDimension(MethodMutant):
    of = SCHEDULES

    @staticmethod
    def merge_chunks(right: Any, chunks: Any, spec: Any) -> Any:
        return right(chunks, None)


@breaks("pipeline/other-dimension", says="must match the size|failed to run forward")
class CutsKeywordsInTheFirstDimension(MethodMutant):
    of = SCHEDULES

    @staticmethod
    def split_args_kwargs_into_chunks(
        right: Any, args: Any, named: Any, chunks: int, spec: Any, _: Any
    ) -> Any:
        return right(args, named, chunks, spec, None)


@breaks("pipeline/input-gradient", says="gradient of the input of GPipe: ")
class DetachesInputs(MethodMutant):
    of = SCHEDULE

    @staticmethod
    def _split_inputs(right: Any, self: Any, args: Any, named: Any = None) -> Any:
        return right(self, tuple(arg.detach() for arg in args), named)


@breaks("pipeline/static-metadata", says="gradient of stage")
class DoublesGradientsOfStagesWithMetadata(StageMutant):
    @staticmethod
    def perform_reduce_grad(right: Any, self: Any, factor: int) -> None:
        right(self, factor)
        if self._user_meta.inputs:
            double_gradients(params_of(self))


@breaks("pipeline/frozen-first-stage", says="gradient of stage 1 of GPipe: ")
@breaks(
    "pipeline/frozen-first-stage-without-bubbles",
    says="gradient of stage 1 of InterleavedZeroBubble: ",
)
class TrainsNothingWithoutAGradientOfTheInput(RepairedButOne):
    of = STAGE

    @staticmethod
    def perform_reduce_grad(right: Any, self: Any, factor: int) -> None:
        right(self, factor)
        if self.stage_index and not self._stage_meta.inputs[0].requires_grad:
            for param in params_of(self):
                param.grad = None


@breaks("pipeline/used-twice", says=r"gradient of stage \d of GPipe: unused")
class GivesUnusedParametersAGradient(StageMutant):
    @staticmethod
    def perform_reduce_grad(right: Any, self: Any, factor: int) -> None:
        right(self, factor)
        for param in params_of(self):
            if param.grad is None:
                param.grad = torch.zeros_like(param)


@breaks("pipeline/tied-stages", says="gradient of stage 0 of ZBVZeroBubble: weight")
class CountsSharedParametersTwice(RepairedButOne):
    of = OF_SEVERAL

    @staticmethod
    def step(right: Any, self: Any, *args: Any, **named: Any) -> Any:
        output = right(self, *args, **named)
        of_stages = [{id(p) for p in params_of(stage)} for stage in self._stages]
        shared = set.intersection(*of_stages)
        double_gradients([p for p in params_of(*self._stages) if id(p) in shared])
        return output


@breaks("pipeline/statistics", says="buffers of stage 0 of GPipe: ")
class RunsTheFirstMicrobatchTwice(RepairedButOne):
    of = STAGE

    @staticmethod
    def forward_maybe_with_nosync(right: Any, self: Any, *args: Any, **named: Any) -> Any:
        if not hasattr(self, "has_run"):
            self.has_run = True
            right(self, *args, **named)
        return right(self, *args, **named)


@breaks("pipeline/split-and-merge", says=r"positional: at \[0\]")
class SplitsInTheOtherOrder(MethodMutant):
    of = f"{PIPELINING}.microbatch"

    @staticmethod
    def split_args_kwargs_into_chunks(right: Any, *args: Any) -> Any:
        positional, named = right(*args)
        return positional[::-1], named


@breaks("pipeline/uneven-batch", says="output: got ")
class LeavesOutRowsThatAreLeft(RepairedButOne):
    of = OF_ONE_STAGE

    @staticmethod
    def step(right: Any, self: Any, *args: Any, target: Any = None, **named: Any) -> Any:
        def even(x: Any) -> Any:
            return None if x is None else x[: len(x) // self._n_microbatches * self._n_microbatches]

        return right(self, *map(even, args), target=even(target), **named)


@breaks("pipeline/other-batch-size", says="output: got ")
class RepeatsRowsOfASmallerBatch(RepairedButOne):
    of = OF_ONE_STAGE

    @staticmethod
    def step(right: Any, self: Any, *args: Any, target: Any = None, **named: Any) -> Any:
        def as_before(x: Any) -> Any:
            wanted = getattr(self, "rows", None)
            return x if x is None or wanted is None else torch.cat([x] * wanted)[:wanted]

        return right(self, *map(as_before, args), target=as_before(target), **named)


@breaks("pipeline/subgroup", says="ValueError: ")
class TakesANumberInTheGroupForOneInTheWorld(StageMutant):
    @staticmethod
    def _resolve_peer_global_rank(right: Any, self: Any, stage: int) -> int:
        peer: int = self.stage_index_to_group_rank[stage]
        return peer


@breaks("pipeline/with-ddp", says="gradient of stage")
class NeverSynchronizes(StageMutant):
    @staticmethod
    def backward_maybe_with_nosync(right: Any, self: Any, *args: Any, **named: Any) -> Any:
        return right(self, *args, **{**named, "last_backward": False})
