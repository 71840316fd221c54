"""Defects of generated mutants: a table of bugs in operations that backends had, or might have.

Each is a function of a call that carries it out wrongly and returns its handle.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.power.calls import (
    IN_PLACE,
    Call,
    first_element,
    last_element,
    snapshots,
    tensors_in,
)
from conformance.power.handles import After, Done, NeverCompleted, Relayed

OPERATIONS = (
    *("all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "gather"),
    *("scatter", "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single"),
    *("all_reduce_coalesced", "all_gather_into_tensor_coalesced"),
    *("reduce_scatter_tensor_coalesced", "send", "recv"),
)
REDUCTIONS = tuple(op for op in OPERATIONS if "reduce" in op)
_COLLECTIVES = tuple(op for op in OPERATIONS if op not in ("send", "recv"))
_WRITING = tuple(op for op in OPERATIONS if op != "send")
_LISTS = ("all_gather", "gather", "all_to_all")
_SEPARATE = tuple(op for op in OPERATIONS if op not in (*IN_PLACE, "recv"))
_ROOTED = ("broadcast", "reduce")
_LATE_S = 0.05


@dataclass(frozen=True, slots=True)
class Defect:
    """A way to go wrong.

    says: in words.
    operations: where it can happen.
    is_of_handles: whether it has nothing to do with the tensors of a call.
    """

    name: str
    says: str
    operations: Collection[str]
    carry_out: Callable[[Call], Any]
    is_of_handles: bool = False


DEFECTS: dict[str, Defect] = {}

F = Callable[[Call], Any]


def _defect(
    says: str, operations: Collection[str], *, of_handles: bool = False
) -> Callable[[F], F]:
    def register(function: F) -> F:
        name = function.__name__
        DEFECTS[name] = Defect(name, says, operations, function, of_handles)
        return function

    return register


def _afterwards(call: Call, change: Callable[[Tensor, Tensor], object]) -> Any:
    """Do it right, then change each result that has elements; `change` is given what was there."""
    before = snapshots(call.results)

    def then() -> None:
        for result, was in zip(call.results, before, strict=True):
            if result.numel():
                change(result, was)

    return After(call.done_right(), then)


@_defect("nothing: the control, against which nothing may be held", OPERATIONS)
def none(call: Call) -> Any:
    return Relayed(call.done_right())


@_defect("the last element of each result is not written", _WRITING)
def misses_the_last(call: Call) -> Any:
    return _afterwards(call, lambda result, was: last_element(result).copy_(last_element(was)))


@_defect("the first element of each result is not written", _WRITING)
def misses_the_first(call: Call) -> Any:
    return _afterwards(call, lambda result, was: first_element(result).copy_(first_element(was)))


@_defect("nothing is written", _WRITING)
def writes_nothing(call: Call) -> Any:
    return _afterwards(call, lambda result, was: result.copy_(was))


@_defect("results begin one element too late", _WRITING)
def shifts_by_one(call: Call) -> Any:
    def shift(result: Tensor, _: Tensor) -> None:
        result.copy_(result.flatten().roll(1).reshape(result.shape))

    return _afterwards(call, shift)


@_defect("results have the precision of the next narrower dtype", _WRITING)
def loses_precision(call: Call) -> Any:
    def round_off(result: Tensor, _: Tensor) -> None:
        if result.dtype in (torch.float64, torch.complex128):
            narrow = torch.float32 if result.dtype is torch.float64 else torch.complex64
            result.copy_(result.to(narrow))
        elif result.dtype is torch.float32:
            result.copy_(result.bfloat16())

    return _afterwards(call, round_off)


@_defect("what lies in memory behind a result is overwritten", _WRITING)
def writes_behind_the_end(call: Call) -> Any:
    def overwrite(result: Tensor, _: Tensor) -> None:
        reach = sum((n - 1) * s for n, s in zip(result.shape, result.stride(), strict=True))
        behind = result.storage_offset() + reach + 1
        if behind * result.element_size() < result.untyped_storage().nbytes():
            result.as_strided((1,), (1,), behind).fill_(1)

    return _afterwards(call, overwrite)


@_defect("the results of the ranks come in reverse order", _LISTS)
def reverses_the_ranks(call: Call) -> Any:
    def reverse() -> None:
        results = call.results
        alike = all(x.shape == results[0].shape for x in results)
        if alike:
            for result, other in zip(results, snapshots(results)[::-1], strict=True):
                result.copy_(other)

    return After(call.done_right(), reverse)


@_defect("the last rank contributes zeros", _COLLECTIVES)
def drops_a_rank(call: Call) -> Any:
    is_last = call.group.rank() == call.group.size() - 1
    return call.with_inputs(torch.zeros_like if is_last else _same)


@_defect("what rank 0 contributes counts twice", REDUCTIONS)
def counts_a_rank_twice(call: Call) -> Any:
    return call.with_inputs(_twice if call.group.rank() == 0 else _same)


@_defect("the inputs of the call before are used again, if they had the same shape", _COLLECTIVES)
def uses_stale_inputs(call: Call) -> Any:
    kept = vars(call.group).setdefault("_kept_inputs", {})
    stale = kept.get(call.operation)
    kept[call.operation] = snapshots(call.inputs)
    fitting = stale is not None and [_kind(x) for x in stale] == [_kind(x) for x in call.inputs]
    if not fitting or not call.inputs:
        return call.done_right()
    left = iter(stale)
    return call.with_inputs(lambda _: next(left))


@_defect("inputs are read as they lie in memory, whatever their strides", _SEPARATE)
def ignores_strides(call: Call) -> Any:
    def as_it_lies(x: Tensor) -> Tensor:
        strides = torch.empty(x.shape).stride()
        reach = sum((n - 1) * s for n, s in zip(x.shape, strides, strict=True)) + x.storage_offset()
        fits = x.numel() and (reach + 1) * x.element_size() <= x.untyped_storage().nbytes()
        return x.as_strided(x.shape, strides) if fits else x

    return call.with_inputs(as_it_lies)


@_defect("the first element of each input is changed", _SEPARATE)
def changes_inputs(call: Call) -> Any:
    def change() -> None:
        for x in call.inputs:
            if x.numel():
                first_element(x).copy_(last_element(x) + 1 if _is_number(x) else ~first_element(x))

    return After(call.done_right(), change)


@_defect("MAX is taken for SUM, and SUM for everything else", REDUCTIONS)
def takes_another_reduction(call: Call) -> Any:
    options = call.options
    given = options.reduceOp
    kinds = dist.ReduceOp
    options.reduceOp = kinds(kinds.MAX if given == kinds.SUM else kinds.SUM)
    try:
        return call.done_right()
    finally:
        options.reduceOp = given


@_defect("the rank after the root is taken for the root", _ROOTED)
def takes_another_root(call: Call) -> Any:
    options = call.options
    given = options.rootRank
    options.rootRank = (given + 1) % call.group.size()
    try:
        return call.done_right()
    finally:
        options.rootRank = given


@_defect("the tag is taken for 0", ("send", "recv"))
def ignores_the_tag(call: Call) -> Any:
    return call.with_options(0)


@_defect("wait returns at once, and results come later", _WRITING)
def returns_before_it_is_done(call: Call) -> Any:
    results, *rest = call.arguments
    copies = [x.clone() for x in tensors_in(results)]
    left = iter(copies)
    work = call.carry_out(_with(results, left), *rest)

    def hand_over() -> None:
        time.sleep(_LATE_S)
        work.wait()
        for result, x in zip(tensors_in(results), copies, strict=True):
            result.detach().copy_(x)

    threading.Thread(target=hand_over).start()
    return Done()


@_defect(
    "a call waits until its operation is done, also if it is asynchronous",
    _COLLECTIVES,
    of_handles=True,
)
def blocks(call: Call) -> Any:
    work = call.done_right()
    work.wait()
    return work


@_defect("is_completed stays False", OPERATIONS, of_handles=True)
def is_never_completed(call: Call) -> Any:
    return NeverCompleted(call.done_right())


@_defect("errors of a wait are lost", OPERATIONS, of_handles=True)
def loses_errors(call: Call) -> Any:
    return LosesErrors(call.done_right())


@_defect("the timeouts of a call and of a wait do not count", _COLLECTIVES, of_handles=True)
def ignores_timeouts(call: Call) -> Any:
    if hasattr(call.options, "timeout"):
        call.options.timeout = timedelta(minutes=5)
    return WaitsOn(call.done_right())


class LosesErrors(Relayed):
    """Waits without ever raising."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        try:
            return super().wait(timeout)
        except RuntimeError:
            return True


class WaitsOn(Relayed):
    """Waits without a timeout."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return super().wait()


def _with(structure: Any, tensors: Any) -> Any:
    """The structure with the next of these in place of each tensor."""
    if isinstance(structure, Tensor):
        return next(tensors)
    return [_with(one, tensors) for one in structure]


def _same(x: Tensor) -> Tensor:
    return x


def _twice(x: Tensor) -> Tensor:
    return x + x if _is_number(x) else x


def _is_number(x: Tensor) -> bool:
    return x.dtype is not torch.bool


def _kind(x: Tensor) -> tuple[object, ...]:
    return x.dtype, x.shape
