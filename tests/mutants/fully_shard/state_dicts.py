"""Mutants of conformance/spec/fully_shard/state_dicts.py."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor

from impl.fully_shard.mesh import Division
from impl.fully_shard.parameter import ShardedParameter
from impl.fully_shard.unit import Unit
from tests.mutants.fsdp.kit import Swapped, nothing
from tests.mutants.fully_shard.kit import fully_shard_then
from tests.mutants.kit import breaks


def _saves(change: Any) -> Any:
    """A swap: state dicts of sharded modules are changed when they are made."""

    def hook(_: Any, root: Any, *args: Any) -> None:
        root.register_state_dict_post_hook(change)

    return fully_shard_then(hook)


def _renamed(module: Any, state: Any, prefix: str, *_: Any) -> None:
    for name in [name for name in state if name.startswith(prefix)]:
        state[name.replace(prefix, f"{prefix}module.", 1)] = state.pop(name)


@breaks("fully_shard/state-dict-keys", says="keys")
class RenamesKeys(Swapped):
    swaps = (_saves(_renamed),)


def _local(module: Any, state: Any, *_: Any) -> None:
    for name, value in state.items():
        if isinstance(value, DTensor):
            state[name] = value.to_local()


@breaks("fully_shard/state-dict-values", says="are DTensors")
@breaks("fully_shard/full-state-dict", says="shapes|raised")
class SavesLocalTensors(Swapped):
    swaps = (_saves(_local),)


@breaks("fully_shard/state-dict-after-a-forward", says="head is a DTensor")
@breaks("fully_shard/loaded-when-whole", says="raised|loss")
class SavesWhatIsWhole(Swapped):
    swaps = ((Unit, "_before_state_dict", nothing),)


@breaks("fully_shard/full-tensor", says="full_tensor is")
@breaks("fully_shard/distributed-state-dict", says="shards|raised")
@breaks("fully_shard/resumed-by-more-ranks", says="params of|raised")
class DividesInReverse(Swapped):
    """The last rank has the first shard, and its DTensor says otherwise."""

    swaps = (
        (
            Division,
            "shard_rank",
            lambda _: property(lambda self: self.shard_count - 1 - self.shard_group.rank()),
        ),
    )


def _clear_after_loading(_: Any, root: Any, *args: Any) -> None:
    def clear(module: Any, _: Any) -> None:
        for param in module.parameters(recurse=False):
            if isinstance(param, DTensor):
                param.to_local().detach().zero_()

    for module in root.modules():
        module.register_load_state_dict_post_hook(clear)


@breaks("fully_shard/load-state-dict", says="loaded shards")
@breaks("fully_shard/optimizer-state-dict", says="shards after the next step")
@breaks("fully_shard/broadcast-state-dict", says="shards")
class LoadsZeros(Swapped):
    swaps = (fully_shard_then(_clear_after_loading),)


@breaks("fully_shard/assigned-state-dict", says="loss|raised")
@breaks("fully_shard/from-meta", says="raised|loss")
@breaks("fully_shard/converted", says="whole weight|raised")
class KeepsTheTensorsOfConstruction(Swapped):
    """Tensors that take the place of shards are not seen."""

    swaps = ((ShardedParameter, "adopt_changes", nothing),)


def _until_prepared(right: Any) -> Any:
    def adopt(self: Any) -> None:
        if self.unsharded is None:
            right(self)

    return adopt


@breaks("fully_shard/converted", says="whole weight, converted later")
class IsConvertedBeforeItsFirstUseAlone(Swapped):
    """A conversion of parameters that have been gathered before is not seen."""

    swaps = ((ShardedParameter, "adopt_changes", _until_prepared),)


def _rolled(_: Any, root: Any, *args: Any) -> None:
    def roll(module: Any, state: Any, *_: Any) -> None:
        for name, value in state.items():
            if isinstance(value, DTensor):
                shard = value.to_local().detach().clone().flip(-1)
                state[name] = DTensor.from_local(
                    shard,
                    value.device_mesh,
                    value.placements,
                    shape=value.shape,
                    stride=value.stride(),
                )

    if "scale" in dict(root.named_buffers()):
        root.register_state_dict_post_hook(roll)


@breaks("fully_shard/local-state", says="shards")
class SavesElementsInReverse(Swapped):
    swaps = (fully_shard_then(_rolled),)
