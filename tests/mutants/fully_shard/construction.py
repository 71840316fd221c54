"""Mutants of conformance/spec/fully_shard/construction.py."""

from __future__ import annotations

import copy
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate

import impl.fully_shard as package
from impl.fully_shard import api, module
from impl.fully_shard.mesh import Division
from impl.fully_shard.state import State
from tests.mutants.fsdp.kit import Swapped, nothing
from tests.mutants.fully_shard.kit import first, fully_shard_then
from tests.mutants.kit import breaks


@breaks("fully_shard/in-place", says="same module")
@breaks("fully_shard/list", says="same list")
class ShardsACopy(Swapped):
    swaps = (
        (
            package,
            "fully_shard",
            lambda right: lambda module, **kwargs: right(copy.deepcopy(module), **kwargs),
        ),
    )


@breaks("fully_shard/class-name", says="name of the class")
class NamesEachClassSharded(Swapped):
    """A new class for each module, called Sharded."""

    swaps = (
        (
            api,
            "sharded_class",
            lambda _: lambda original: type("Sharded", (module.FSDPModule, original), {}),
        ),
    )


def _sort(_: Any, root: Any, *args: Any) -> None:
    for each in root.modules():
        for name in sorted(each._parameters):
            each._parameters[name] = each._parameters.pop(name)


@breaks("fully_shard/names", says="names")
class SortsParameters(Swapped):
    swaps = (fully_shard_then(_sort),)


@breaks("fully_shard/dtensors", says="placed")
class SaysThatShardsAreReplicas(Swapped):
    swaps = ((Division, "placements", lambda _: lambda self, shard: (Replicate(),)),)


@breaks("fully_shard/shards", says="shard of")
class TakesTheShardOfAnotherRank(Swapped):
    swaps = (
        (
            Division,
            "shard_rank",
            lambda _: property(lambda self: self.shard_count - 1 - self.shard_group.rank()),
        ),
    )


def _thaw(_: Any, root: Any, *args: Any) -> None:
    root.requires_grad_(True)


@breaks("fully_shard/requires-grad", says="requires_grad")
class ThawsParameters(Swapped):
    """All shards require gradients."""

    swaps = (fully_shard_then(_thaw),)


def _double(_: Any, root: Any, *args: Any) -> None:
    for buffer in root.buffers():
        buffer.mul_(2)


@breaks("fully_shard/buffers", says="the buffer")
class ChangesBuffers(Swapped):
    swaps = (fully_shard_then(_double),)


def _untie(root: Any, *args: Any) -> None:
    if getattr(root, "head", None) is not None:
        root.head.weight = nn.Parameter(root.head.weight.detach().clone())


@breaks("fully_shard/tied-names", says="one parameter")
@breaks("fully_shard/tied", says="grads")
class UntiesWeights(Swapped):
    swaps = ((package, "fully_shard", first(_untie)),)


def _broadcast(params: Any, modules: Any, choices: Any, device: Any) -> None:
    group = choices.division.shard_group
    for param in params:
        dist.broadcast(param.detach(), dist.get_global_rank(group, 0), group)


@breaks("fully_shard/silent-construction", says="issued: ")
@breaks("fully_shard/own-values", says="values")
class BroadcastsTheFirstRanksValues(Swapped):
    swaps = ((api, "build_units", first(_broadcast)),)


def _alone(*_: Any) -> Any:
    shape = (dist.get_world_size(), 1)
    return init_device_mesh("cpu", shape, mesh_dim_names=("others", "own"))["own"]


@breaks("fully_shard/default-mesh", says="ranks of the mesh")
class DividesAmongNobody(Swapped):
    """Without a mesh, each rank is alone."""

    swaps = ((api, "default_mesh", lambda _: _alone),)


@breaks("fully_shard/slices", says="class of a slice")
class SlicesAreSharded(Swapped):
    swaps = (
        (
            module.FSDPModule,
            "__new__",
            lambda _: lambda cls, *args, **kwargs: object.__new__(cls),
        ),
    )


@breaks("fully_shard/ignored-params", says="same tensor")
class IgnoresNothing(Swapped):
    swaps = (
        (
            api,
            "managed_parameters",
            lambda right: lambda modules, ignored: right(modules, set()),
        ),
    )


@breaks("fully_shard/optimizer-state", says="shapes of the optimizer's state")
class ShardsNothing(Swapped):
    """Whatever the mesh, each rank has all of each parameter."""

    swaps = (
        (
            package,
            "fully_shard",
            lambda right: lambda module, **kwargs: right(module, **{**kwargs, "mesh": _alone()}),
        ),
    )


def _one_by_one(right: Any) -> Any:
    return lambda params, *args: [unit for param in params for unit in right([param], *args)]


@breaks("fully_shard/earlier-calls", says="gathered after the root")
@breaks("fully_shard/mixed-job", says="raised")
@breaks("fully_shard/gathers-in-forward", says="forward: the traces part")
class GathersEachParameterAlone(Swapped):
    swaps = ((api, "build_units", _one_by_one),)


@breaks("fully_shard/added-layer", says="added, silently")
class SaysNothingOfAddedLayers(Swapped):
    swaps = ((State, "_warn_of_added_parameters", nothing),)
