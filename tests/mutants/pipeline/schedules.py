"""Mutants of conformance/spec/pipeline/schedules.py."""

from __future__ import annotations

import time
from typing import Any

from torch.distributed.pipelining import schedules

from tests.mutants.kit import breaks
from tests.mutants.pipeline.kit import (
    OF_ONE_STAGE,
    SCHEDULE,
    SCHEDULES,
    RepairedButOne,
    ScheduleMutant,
    StageMutant,
    double_gradients,
    params_of,
)
from tests.mutants.replacing import MethodMutant


def targets_in_the_other_order(
    right: Any, self: Any, args: Any, named: Any, targets: Any, *rest: Any, **how: Any
) -> Any:
    return right(self, args, named, targets and targets[::-1], *rest, **how)


@breaks("pipeline/gpipe", says="gradient of stage")
class GPipeTakesTargetsInTheOtherOrder(MethodMutant):
    of = f"{SCHEDULES}:ScheduleGPipe"
    _step_microbatches = staticmethod(targets_in_the_other_order)


@breaks("pipeline/1f1b", says="gradient of stage")
class OneForwardOneBackwardTakesTargetsInTheOtherOrder(MethodMutant):
    of = f"{SCHEDULES}:Schedule1F1B"
    _step_microbatches = staticmethod(targets_in_the_other_order)


@breaks("pipeline/looped-bfs", says="gradient of stage")
class LoopedBFSTakesTargetsInTheOtherOrder(MethodMutant):
    of = f"{SCHEDULES}:ScheduleLoopedBFS"
    _step_microbatches = staticmethod(targets_in_the_other_order)


@breaks("pipeline/interleaved-1f1b", says="gradient of stage")
class InterleavedTakesTargetsInTheOtherOrder(MethodMutant):
    of = f"{SCHEDULES}:ScheduleInterleaved1F1B"
    _step_microbatches = staticmethod(targets_in_the_other_order)


@breaks("pipeline/interleaved-zero-bubble", says="gradient of stage")
class ZeroBubbleTakesTargetsInTheOtherOrder(MethodMutant):
    of = f"{SCHEDULES}:ScheduleInterleavedZeroBubble"
    _step_microbatches = staticmethod(targets_in_the_other_order)


@breaks("pipeline/zbv", says="gradient of stage")
class ZBVTakesTargetsInTheOtherOrder(MethodMutant):
    of = f"{SCHEDULES}:ScheduleZBVZeroBubble"
    _step_microbatches = staticmethod(targets_in_the_other_order)


@breaks("pipeline/dual-pipe-v", says="gradient of stage")
class DualPipeVTakesTargetsInTheOtherOrder(MethodMutant):
    of = f"{SCHEDULES}:ScheduleDualPipeV"
    _step_microbatches = staticmethod(targets_in_the_other_order)


@breaks("pipeline/losses", says="losses of GPipe: at ")
class GivesLossesInTheOtherOrder(ScheduleMutant):
    @staticmethod
    def _update_losses(right: Any, self: Any, stages: Any, losses: Any) -> None:
        right(self, stages, losses)
        if self._num_stages and losses and losses[0] != "old":
            losses.reverse()


@breaks("pipeline/outputs", says="output of GPipe: ")
class MergesOutputsInTheOtherOrder(ScheduleMutant):
    @staticmethod
    def _merge_outputs(right: Any, self: Any, chunks: Any) -> Any:
        return right(self, chunks[::-1])


@breaks("pipeline/no-outputs", says="output of GPipe: ")
class AlwaysGivesOutputs(MethodMutant):
    of = OF_ONE_STAGE

    @staticmethod
    def step(right: Any, self: Any, *args: Any, return_outputs: bool = True, **named: Any) -> Any:
        return right(self, *args, **named)


@breaks("pipeline/means", says="gradient of stage")
class DividesByTheStages(StageMutant):
    @staticmethod
    def scale_grads(right: Any, self: Any, factor: int) -> None:
        right(self, factor if factor == 1 else self.num_stages)


@breaks("pipeline/accumulated", says="gradient of stage")
class ForgetsEarlierGradients(RepairedButOne):
    of = OF_ONE_STAGE

    @staticmethod
    def step(right: Any, self: Any, *args: Any, **named: Any) -> Any:
        for param in params_of(self._stage):
            param.grad = None
        return right(self, *args, **named)


@breaks("pipeline/training", says="weight: ")
@breaks("pipeline/any-schedule", says="gradient of stage")
class DoublesGradientsAfterTheFirstStep(StageMutant):
    @staticmethod
    def perform_reduce_grad(right: Any, self: Any, factor: int) -> None:
        right(self, factor)
        if hasattr(self, "has_stepped"):
            double_gradients(params_of(self))
        self.has_stepped = True


@breaks("pipeline/late-ranks", says="gradient of stage")
class GivesUpOnSlowStages(StageMutant):
    @staticmethod
    def forward_maybe_with_nosync(right: Any, self: Any, *args: Any, **named: Any) -> Any:
        started = time.perf_counter()
        output = right(self, *args, **named)
        return output * 0 if time.perf_counter() - started > 0.004 else output


@breaks("pipeline/eval", says="gradient of stage")
class TrainsInEval(ScheduleMutant):
    @staticmethod
    def eval(right: Any, self: Any, *args: Any, **named: Any) -> Any:
        return self.step(*args, **named)


@breaks("pipeline/refused-in-eval", says="gradient of stage")
class NeverTrainsAfterARefusal(ScheduleMutant):
    """An eval that raises leaves the schedule without backward."""

    @staticmethod
    def eval(right: Any, self: Any, *args: Any, **named: Any) -> Any:
        try:
            return right(self, *args, **named)
        except TypeError:
            self._has_backward = False
            raise


@breaks("pipeline/eval-of-a-v", says="output of ZBVZeroBubble: ")
@breaks("pipeline/eval-without-target", says="output of GPipe: ")
class MergesOutputsInTheOtherOrderInEval(RepairedButOne):
    of = SCHEDULE

    @staticmethod
    def _merge_outputs(right: Any, self: Any, chunks: Any) -> Any:
        return right(self, chunks if self._has_backward else chunks[::-1])


@breaks("pipeline/after-an-exception", says="gradient of stage")
class KeepsTheLossesOfAStepThatRaised(RepairedButOne):
    of = OF_ONE_STAGE

    @staticmethod
    def step(right: Any, self: Any, *args: Any, **named: Any) -> Any:
        try:
            output = right(self, *args, **named)
        except Exception:
            self.has_raised = True
            raise
        if hasattr(self, "has_raised"):
            double_gradients(params_of(self._stage))
        return output


@breaks("pipeline/kept-by-1f1b", says="microbatches kept: ")
class OneForwardOneBackwardIsGPipe(MethodMutant):
    of = f"{SCHEDULES}:Schedule1F1B"

    @staticmethod
    def _step_microbatches(right: Any, self: Any, *args: Any, **named: Any) -> Any:
        schedules.ScheduleGPipe._step_microbatches(self, *args, **named)


@breaks("pipeline/kept-by-gpipe", says="microbatches kept: ")
class GPipeIsOneForwardOneBackward(MethodMutant):
    of = f"{SCHEDULES}:ScheduleGPipe"

    @staticmethod
    def _step_microbatches(right: Any, self: Any, *args: Any, **named: Any) -> Any:
        schedules.Schedule1F1B._step_microbatches(self, *args, **named)


@breaks("pipeline/names", says="ValueError: gpipe")
class KnowsNamesInOneCase(MethodMutant):
    of = SCHEDULES

    @staticmethod
    def get_schedule_class(right: Any, name: str) -> Any:
        if name == name.lower():
            raise ValueError(name)
        return right(name)


@breaks("pipeline/refused", says=r"1F1B of one microbatch: \(nothing was raised")
class TakesAnyNumberOfMicrobatches(MethodMutant):
    of = f"{SCHEDULES}:Schedule1F1B"

    @staticmethod
    def __init__(right: Any, self: Any, stage: Any, n_microbatches: int, **how: Any) -> None:
        right(self, stage, max(n_microbatches, stage.num_stages), **how)
