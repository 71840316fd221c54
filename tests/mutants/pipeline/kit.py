"""Classes that mutants of pipelines are about, and torch's pipelines with their faults mended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor

from tests.mutants.kit import Patch
from tests.mutants.replacing import MethodMutant, methods_replaced

PIPELINING = "torch.distributed.pipelining"
SCHEDULES = f"{PIPELINING}.schedules"
SCHEDULE = f"{SCHEDULES}:_PipelineSchedule"
OF_ONE_STAGE = f"{SCHEDULES}:PipelineScheduleSingle"
OF_SEVERAL = f"{SCHEDULES}:PipelineScheduleMulti"
STAGE = f"{PIPELINING}.stage:_PipelineStageBase"


class StageMutant(MethodMutant):
    of = STAGE


class ScheduleMutant(MethodMutant):
    of = SCHEDULE


def stages_of(schedule: Any) -> list[Any]:
    return getattr(schedule, "_stages", None) or [schedule._stage]


def params_of(*stages: Any) -> list[Any]:
    """Each of them once."""
    return list({id(p): p for stage in stages for p in stage.submod.parameters()}.values())


def double_gradients(params: list[Any]) -> None:
    for param in params:
        if param.grad is not None:
            param.grad *= 2


@contextmanager
def repaired() -> Iterator[None]:
    """Pipelines that keep the rules that torch's break."""
    inference = f"{PIPELINING}.stage:PipelineStage"
    with ExitStack() as stack:
        for of, methods in (
            (OF_ONE_STAGE, {"step": step_by_itself}),
            (OF_SEVERAL, {"step": step_by_itself}),
            (SCHEDULE, {"eval": eval_with_any_target}),
            (inference, {"_forward_metadata_inference": leaving_buffers}),
            (STAGE, {"perform_reduce_grad": without_scale}),
            (STAGE, {"backward_one_chunk": all_at_once}),
            (STAGE, {"backward_weight_one_chunk": unless_done}),
            (STAGE, {"get_local_bwd_output": nothing_in_eval}),
            (STAGE, {"set_local_bwd_input": taking_nothing_in_eval}),
        ):
            stack.enter_context(methods_replaced(of, methods))
        yield


def step_by_itself(right: Any, self: Any, *args: Any, **named: Any) -> Any:
    """Its gradients are scaled once, and then added; an exception leaves nothing behind."""
    given = [x for x in (*args, named.get("target")) if isinstance(x, Tensor)]
    dim = self._args_chunk_spec[0].split_dim if self._args_chunk_spec and args else 0
    rows = given[0].size(dim) if given else None
    if given and (rows % self._n_microbatches or rows != getattr(self, "rows", rows)):
        raise ValueError(f"{rows} rows")
    self.rows = rows
    params = params_of(*stages_of(self))
    before = [param.grad for param in params]
    for param in params:
        param.grad = None
    try:
        output = right(self, *args, **named)
    finally:
        self._internal_losses.clear()
    for param, old in zip(params, before, strict=True):
        if param.grad is not None and self.scale_grads:
            param.grad /= self._n_microbatches
        if old is not None:
            param.grad = old if param.grad is None else old + param.grad
    return output


def eval_with_any_target(
    right: Any, self: Any, *args: Any, target: Any = None, **named: Any
) -> Any:
    loss, last = self._loss_fn, any(stage.is_last for stage in stages_of(self))
    if target is None and last:
        self._loss_fn = None
    try:
        return right(self, *args, target=target, **named)
    finally:
        self._loss_fn = loss


def leaving_buffers(right: Any, self: Any, *args: Any, **named: Any) -> Any:
    before = [buffer.clone() for buffer in self.submod.buffers()]
    found = right(self, *args, **named)
    for buffer, old in zip(self.submod.buffers(), before, strict=True):
        buffer.copy_(old)
    return found


def without_scale(right: Any, self: Any, factor: int) -> None:
    right(self, 1)


def all_at_once(
    right: Any, self: Any, chunk: int, loss: Any = None, full_backward: bool = True, **named: Any
) -> None:
    """Where no input has a gradient, that of the weights cannot be computed from it later."""
    inputs = self.fwd_cache[chunk][1] if self.has_backward else ()
    is_split = not full_backward and not self.is_first
    if is_split and not any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
        self.chunks_done = {*getattr(self, "chunks_done", ()), chunk}
        full_backward = True
    right(self, chunk, loss=loss, full_backward=full_backward, **named)


def unless_done(right: Any, self: Any, chunk: int, **named: Any) -> None:
    done: set[int] = getattr(self, "chunks_done", set())
    if chunk not in done:
        right(self, chunk, **named)
    done.discard(chunk)


def nothing_in_eval(right: Any, self: Any, chunk: int) -> Any:
    return right(self, chunk) if self.has_backward else ()


def taking_nothing_in_eval(right: Any, self: Any, outputs: Any, chunk: int) -> None:
    if self.has_backward:
        right(self, outputs, chunk)


class RepairedButOne(MethodMutant):
    """Breaks something in pipelines that keep all rules."""

    repaired = staticmethod(repaired)


class Repaired(Patch):
    """No mutant, but a target that keeps all rules of pipelines."""

    patched = staticmethod(repaired)
