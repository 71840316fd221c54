"""Mutants of conformance/spec/fully_shard/by_hand.py."""

from __future__ import annotations

from typing import Any

import impl.fully_shard as package
from impl.fully_shard import module
from impl.fully_shard.module import FSDPModule
from impl.fully_shard.parameter import ShardedParameter
from impl.fully_shard.unit import Unit
from tests.mutants.fsdp.kit import Swapped, nothing
from tests.mutants.fully_shard.kit import first, then
from tests.mutants.kit import breaks


@breaks("fully_shard/unshard", says="is whole")
@breaks("fully_shard/unshard-async", says="is whole")
class DoesNotUnshard(Swapped):
    """A handle of unshard does not wait, and so nothing becomes whole."""

    swaps = ((module._Gathering, "wait", nothing),)


def _below(_: Any, root: Any, *args: Any) -> None:
    for each in root._sharded_modules(True):
        for unit in each._units:
            unit.prepare()
            unit.gather()
            unit.wait()


@breaks("fully_shard/unshard-alone", says="head and block are sharded")
class UnshardsAllBelow(Swapped):
    swaps = ((FSDPModule, "unshard", then(_below)),)


@breaks("fully_shard/reshard", says="the shard again")
@breaks("fully_shard/whole-is-a-copy", says="gathered again")
@breaks("fully_shard/second-wait", says="is sharded")
class DoesNotReshard(Swapped):
    swaps = ((FSDPModule, "reshard", nothing),)


def _forget(unit: Any) -> None:
    unit._gathered = None


@breaks("fully_shard/forward-waits", says="gathers")
class ForgetsWhatIsOnItsWay(Swapped):
    """A forward gathers anew what an unshard has begun to gather."""

    swaps = ((Unit, "begin_forward", first(_forget)),)


def _free_first(unit: Any) -> None:
    unit.shard_fully()


@breaks("fully_shard/unshard-once", says="gathers")
class GathersWhatIsWhole(Swapped):
    swaps = ((Unit, "gather", first(_free_first)),)


def _whole_first(root: Any) -> None:
    root.unshard()


@breaks("fully_shard/reshard-of-shards", says="issued")
class ReshardsWhatItUnshards(Swapped):
    """reshard gathers what is not whole, in order to free it."""

    swaps = ((FSDPModule, "reshard", first(_whole_first)),)


def _remember(_: Any, parameter: Any, *args: Any) -> None:
    parameter.stale = parameter.flat_shard.clone()


@breaks("fully_shard/shards-are-the-parameters", says="gathered")
class GathersACopyOfConstruction(Swapped):
    """What is gathered is what the shards were when the module was sharded."""

    swaps = (
        (ShardedParameter, "__init__", then(_remember)),
        (ShardedParameter, "to_be_gathered", lambda _: lambda self: self.stale),
    )


@breaks("fully_shard/forward-method", says="sharded in the method|raised")
class RegistersNoMethod(Swapped):
    swaps = ((package, "register_fsdp_forward_method", nothing),)


def _wrap(module: Any, name: str) -> None:
    method = getattr(module, name)
    if not isinstance(module, FSDPModule):
        setattr(module, name, lambda *args: method(*args))


@breaks("fully_shard/forward-method-unsharded", says="the method")
class RegistersMethodsOfAnything(Swapped):
    swaps = ((package, "register_fsdp_forward_method", first(_wrap)),)
