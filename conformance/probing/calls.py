"""Probes of operations, reductions and dtypes: small calls by two ranks, and expected results."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from conformance.harness.me import Me
from conformance.oracle.collectives import Call, after, contribution, receives
from conformance.oracle.data import blank
from conformance.probing.findings import Probe
from conformance.spec.collectives.perform import perform

WORLD_SIZE = 2
_SHAPE = (5,)  # which two ranks cannot divide evenly
_ROOT = 1
_FACTOR = 2.0
_LATE_S = 0.2

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


def probe_op(op: str, reduction: str = "sum", dtype: str = "float32") -> Probe:
    """The probe of one operation, with one reduction and one dtype."""
    call = Call(op, _SHAPE, dtype, reduction, _ROOT)
    if op in ("barrier", "monitored_barrier"):
        early = "a rank left the barrier before the other one had come"
        return Probe(_OTHERS[op], (call,), (True, True), early)
    want = tuple(_wanted(call, rank) for rank in range(WORLD_SIZE))
    return Probe(_OTHERS.get(op, perform_collective), (call,), want)


def _wanted(call: Call, rank: int) -> list[Tensor]:
    """What lies in the tensors that the rank's call fills. Pure."""
    if call.op == "send":
        return [contribution(call, 1 - rank)]
    if not receives(call, rank):
        return []
    if call.reduce_op == "premul_sum":
        sums = after(Call(call.op, call.shape, call.dtype, root=call.root), rank, WORLD_SIZE)
        return [_FACTOR * x for x in sums.taken]
    return list(after(call, rank, WORLD_SIZE).taken)


def perform_collective(me: Me, call: Call) -> list[Tensor]:
    """The tensors that this rank's call fills."""
    is_scaled = call.reduce_op == "premul_sum"
    reduce_op = dist._make_nccl_premul_sum(_FACTOR) if is_scaled else None
    seen = perform(me, call, reduce_op=reduce_op)
    return list(seen.taken) if receives(call, me.rank) else []


def send(me: Me, call: Call) -> list[Tensor]:
    """A message there and one back."""
    mine = contribution(call, me.rank).to(me.device)
    got = blank(call.shape, call.dtype).to(me.device)
    if me.rank == 0:
        dist.send(mine, 1)
        dist.recv(got, 1)
    else:
        dist.recv(got, 0)
        dist.send(mine, 0)
    return [got]


def barrier(me: Me, call: Call) -> bool:
    return _meets(me, call.op, dist.barrier)


def monitored_barrier(me: Me, call: Call) -> bool:
    """By the group's method: torch's function hands over to it for the backend "gloo" alone."""
    group: Any = dist.group.WORLD
    timeout = timedelta(seconds=me.group_timeout_s)
    return _meets(me, call.op, lambda: group.monitored_barrier(timeout, False))


def _meets(me: Me, name: str, wait: Callable[[], object]) -> bool:
    """Whether all ranks have come when one leaves the barrier; the last one is late."""
    if me.rank == WORLD_SIZE - 1:
        time.sleep(_LATE_S)
    me.store.set(f"{name}/{me.rank}", "")
    wait()
    return all(me.store.check([f"{name}/{rank}"]) for rank in range(WORLD_SIZE))


# Operations that no collective of the oracle stands for.
_OTHERS: Mapping[str, Callable[..., Any]] = {
    "barrier": barrier,
    "monitored_barrier": monitored_barrier,
    "send": send,
}
