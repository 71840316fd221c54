"""Mutants of conformance/spec/fully_shard/traces.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

from impl.fully_shard import build, collectives
from impl.fully_shard.module import FSDPModule
from impl.fully_shard.parameter import ShardedParameter
from impl.fully_shard.state import State
from impl.fully_shard.unit import Unit
from tests.mutants.fsdp.kit import Swapped, always, nothing
from tests.mutants.fully_shard.kit import then
from tests.mutants.kit import breaks


@breaks("fully_shard/gathers-in-backward", says="backward gathers: the traces part")
@breaks("fully_shard/trace", says="the traces part")
@breaks("fully_shard/trace-of-layers", says="the traces part")
@breaks("fully_shard/trace-of-a-list", says="the traces part")
@breaks("fully_shard/trace-when-freed", says="the traces part")
@breaks("fully_shard/trace-of-two-forwards", says="the traces part")
@breaks("fully_shard/whole-in-forward", says="forward: whole are")
@breaks("fully_shard/sharded-after-forward", says="between: whole are")
@breaks("fully_shard/root-freed", says="the root is whole")
@breaks("fully_shard/sharded-in-evaluation", says="whole are")
class NeverFreesAfterTheForward(Swapped):
    swaps = ((build, "division_after_forward", always(None)),)


@breaks("fully_shard/trace-when-kept", says="the traces part")
@breaks("fully_shard/kept-after-forward", says="between: whole are")
@breaks("fully_shard/smaller-shards", says="after the forward")
@breaks("fully_shard/smaller-gathers", says="gathers of all ranks in the backward")
class AlwaysFreesAfterTheForward(Swapped):
    swaps = ((build, "division_after_forward", lambda _: lambda choice, division: division),)


def _one_by_one(right: Any) -> Any:
    def wrong(self: Any, parameters: Any, gradients: Any) -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            right(self, [parameter], [gradient])

    return wrong


@breaks("fully_shard/scatters-in-backward", says="backward scatters: the traces part")
class ReducesEachParameterAlone(Swapped):
    swaps = ((Unit, "_reduce", _one_by_one),)


def _tell(_: Any, state: Any) -> None:
    group = state.step.states[0].units[0].division.shard_group
    last = group.size() - 1
    if group.rank() == 0:
        dist.send(torch.zeros(1), dist.get_global_rank(group, last), group)
    elif group.rank() == last:
        dist.recv(torch.zeros(1), dist.get_global_rank(group, 0), group)


@breaks("fully_shard/same-calls", says="what is issued: ")
class FirstRankSendsAnExtraMessage(Swapped):
    """After a backward the first rank sends the last one a number."""

    swaps = ((State, "_end_step", then(_tell)),)


@breaks("fully_shard/trace-of-accumulation", says="the traces part")
@breaks("fully_shard/no-sync", says="reductions")
class ReducesAlways(Swapped):
    """set_requires_gradient_sync has no effect."""

    swaps = ((FSDPModule, "set_requires_gradient_sync", nothing),)


@breaks("fully_shard/trace-in-low-precision", says="raised RuntimeError")
@breaks("fully_shard/param-dtype", says="whole weight")
@breaks("fully_shard/gather-dtype", says="gathers in|raised")
class IgnoresPolicies(Swapped):
    """Parameters are computed and reduced in their own dtype."""

    swaps = (
        (
            ShardedParameter,
            "set_precision",
            lambda right: lambda self, _: right(self, MixedPrecisionPolicy()),
        ),
    )


def _twice(right: Any) -> Any:
    def wrong(device: Any, row: Any, *args: Any) -> None:
        right(device, row.clone(), *args)
        right(device, row, *args)

    return wrong


@breaks("fully_shard/trace-of-replicas", says="the traces part")
@breaks("fully_shard/trace-of-accumulation-over-replicas", says="the traces part")
class ReducesOverReplicasTwice(Swapped):
    swaps = ((collectives, "add_replicas", _twice),)
