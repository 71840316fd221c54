"""A small call of each operation by two ranks, and what each of them must have afterwards.

The tensors have three elements, which two ranks cannot divide evenly. Rank 1 is the root.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.harness.me import Me
from conformance.probing.findings import Probe

WORLD_SIZE = 2
_ROOT = 1
_FACTOR = 2.0
_LATE_S = 0.2

Given = tuple[tuple[int, ...], ...]  # what each rank contributes

# Small enough for float8, and different as bools too.
GIVEN: Given = ((1, 0, 0), (2, 0, 3))
# Each reduction of these comes out differently.
FACTORS: Given = ((6, 5, 1), (3, 9, 1))

_REDUCED: Mapping[str, Callable[[int, int], float]] = {
    "sum": operator.add,
    "avg": lambda a, b: (a + b) / WORLD_SIZE,
    "product": operator.mul,
    "min": min,
    "max": max,
    "band": operator.and_,
    "bor": operator.or_,
    "bxor": operator.xor,
    "premul_sum": lambda a, b: _FACTOR * (a + b),
}

REDUCING = ("all_reduce", "reduce", "reduce_scatter_tensor", "reduce_scatter")
MOVING = (
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "send",
    "all_to_all_single",
    "all_to_all",
    "scatter",
    "gather",
)


def probe_op(
    op: str, reduction: str = "sum", dtype: str = "float32", given: Given = GIVEN
) -> Probe:
    """The probe of one operation, with one reduction and one dtype."""
    want = tuple(
        [_tensor(row, dtype) for row in _wanted(op, rank, reduction, given)]
        for rank in range(WORLD_SIZE)
    )
    if op in ("barrier", "monitored_barrier"):
        early = "a rank left the barrier before the other one had come"
        return Probe(_CALLS[op], (given, dtype, reduction), (True, True), early)
    return Probe(_CALLS[op], (given, dtype, reduction), want)


def _wanted(op: str, rank: int, reduction: str, given: Given) -> list[list[float]]:
    """What lies in each tensor that the rank's call returns. Pure."""
    to_me = [_piece(given, source, rank) for source in range(WORLD_SIZE)]
    if op == "all_reduce" or (op == "reduce" and rank == _ROOT):
        return [_reduced(reduction, given)]
    if op in ("reduce_scatter", "reduce_scatter_tensor"):
        return [_reduced(reduction, to_me)]
    if op == "all_gather" or (op == "gather" and rank == _ROOT):
        return [list(row) for row in given]
    if op == "all_gather_into_tensor":
        return [[x for row in given for x in row]]
    if op == "all_to_all_single":
        return [[x for row in to_me for x in row]]
    moved: Mapping[str, list[list[float]]] = {
        "broadcast": [list(given[_ROOT])],
        "scatter": [to_me[_ROOT]],
        "all_to_all": to_me,
        "send": [list(given[1 - rank])],
    }
    return moved.get(op, [])


def _reduced(reduction: str, rows: Sequence[Sequence[float]]) -> list[float]:
    combine: Callable[..., float] = _REDUCED[reduction]
    return [combine(a, b) for a, b in zip(*rows, strict=True)]


def _piece(given: Given, source: int, destination: int) -> list[float]:
    """What `source` has for `destination`, of several that it has: its row, shifted."""
    row = given[source]
    return [*row[-destination:], *row[:-destination]] if destination else list(row)


def _tensor(row: Sequence[float], dtype: str) -> Tensor:
    return torch.tensor(row).to(getattr(torch, dtype))


def own(me: Me, given: Given = GIVEN, dtype: str = "float32") -> Tensor:
    """What this rank contributes."""
    return _tensor(given[me.rank], dtype).to(me.device)


def _pieces(me: Me, given: Given, dtype: str) -> list[Tensor]:
    each = (_piece(given, me.rank, destination) for destination in range(WORLD_SIZE))
    return [_tensor(piece, dtype).to(me.device) for piece in each]


def _blank(me: Me, given: Given, dtype: str, rows: int = 1) -> Tensor:
    """Room for so many rows, of ones: no result is nothing but ones."""
    return _tensor([1] * (len(given[0]) * rows), dtype).to(me.device)


def _blanks(me: Me, given: Given, dtype: str) -> list[Tensor]:
    return [_blank(me, given, dtype) for _ in range(WORLD_SIZE)]


def op_of(reduction: str) -> Any:
    """What torch's calls take."""
    if reduction == "premul_sum":
        return dist._make_nccl_premul_sum(_FACTOR)
    return getattr(dist.ReduceOp, reduction.upper())


def all_reduce(me: Me, given: Given, dtype: str, reduction: str) -> list[Tensor]:
    x = own(me, given, dtype)
    dist.all_reduce(x, op_of(reduction))
    return [x]


def reduce(me: Me, given: Given, dtype: str, reduction: str) -> list[Tensor]:
    x = own(me, given, dtype)
    dist.reduce(x, _ROOT, op_of(reduction))
    return [x] if me.rank == _ROOT else []


def broadcast(me: Me, given: Given, dtype: str, reduction: str) -> list[Tensor]:
    x = own(me, given, dtype)
    dist.broadcast(x, _ROOT)
    return [x]


def all_gather(me: Me, given: Given, dtype: str, reduction: str) -> list[Tensor]:
    outputs = _blanks(me, given, dtype)
    dist.all_gather(outputs, own(me, given, dtype))
    return outputs


def all_gather_into_tensor(me: Me, given: Given, dtype: str, reduction: str) -> list[Tensor]:
    output = _blank(me, given, dtype, WORLD_SIZE)
    dist.all_gather_into_tensor(output, own(me, given, dtype))
    return [output]


def reduce_scatter(me: Me, given: Given, dtype: str, reduction: str) -> list[Tensor]:
    output = _blank(me, given, dtype)
    dist.reduce_scatter(output, _pieces(me, given, dtype), op_of(reduction))
    return [output]


def reduce_scatter_tensor(me: Me, given: Given, dtype: str, reduction: str) -> list[Tensor]:
    output = _blank(me, given, dtype)
    dist.reduce_scatter_tensor(output, torch.cat(_pieces(me, given, dtype)), op_of(reduction))
    return [output]


def all_to_all(me: Me, given: Given, dtype: str, reduction: str) -> list[Tensor]:
    outputs = _blanks(me, given, dtype)
    dist.all_to_all(outputs, _pieces(me, given, dtype))
    return outputs


def all_to_all_single(me: Me, given: Given, dtype: str, reduction: str) -> list[Tensor]:
    output = _blank(me, given, dtype, WORLD_SIZE)
    dist.all_to_all_single(output, torch.cat(_pieces(me, given, dtype)))
    return [output]


def gather(me: Me, given: Given, dtype: str, reduction: str) -> list[Tensor]:
    outputs = _blanks(me, given, dtype) if me.rank == _ROOT else None
    dist.gather(own(me, given, dtype), outputs, _ROOT)
    return outputs or []


def scatter(me: Me, given: Given, dtype: str, reduction: str) -> list[Tensor]:
    output = _blank(me, given, dtype)
    inputs = _pieces(me, given, dtype) if me.rank == _ROOT else None
    dist.scatter(output, inputs, _ROOT)
    return [output]


def send(me: Me, given: Given, dtype: str, reduction: str) -> list[Tensor]:
    """A message there and one back."""
    got = _blank(me, given, dtype)
    if me.rank == 0:
        dist.send(own(me, given, dtype), 1)
        dist.recv(got, 1)
    else:
        dist.recv(got, 0)
        dist.send(own(me, given, dtype), 0)
    return [got]


def barrier(me: Me, given: Given, dtype: str, reduction: str) -> bool:
    return _meets(me, "barrier", dist.barrier)


def monitored_barrier(me: Me, given: Given, dtype: str, reduction: str) -> bool:
    """By the group's method: torch's function hands over to it for the backend "gloo" alone."""
    group: Any = dist.group.WORLD
    timeout = timedelta(seconds=me.group_timeout_s)
    return _meets(me, "monitored barrier", lambda: group.monitored_barrier(timeout, False))


def _meets(me: Me, name: str, wait: Callable[[], object]) -> bool:
    """Whether all ranks have come when one leaves the barrier; the last one is late."""
    if me.rank == WORLD_SIZE - 1:
        time.sleep(_LATE_S)
    me.store.set(f"{name}/{me.rank}", "")
    wait()
    return all(me.store.check([f"{name}/{rank}"]) for rank in range(WORLD_SIZE))


_CALLS: Mapping[str, Callable[..., Any]] = {
    call.__name__: call
    for call in (
        all_reduce,
        reduce,
        broadcast,
        all_gather,
        all_gather_into_tensor,
        reduce_scatter,
        reduce_scatter_tensor,
        all_to_all,
        all_to_all_single,
        gather,
        scatter,
        barrier,
        monitored_barrier,
        send,
    )
}
