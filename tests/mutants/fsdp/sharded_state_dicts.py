"""Mutants of conformance/spec/fsdp/sharded_state_dicts.py."""

from __future__ import annotations

from typing import Any

import torch

from impl.fsdp.checkpoint import optim_save, sharded_values, state_dict
from tests.mutants.fsdp.kit import Swapped
from tests.mutants.kit import breaks


def _with_the_first_row_twice(right: Any) -> Any:
    def wrong(tensor: torch.Tensor, state: Any) -> Any:
        if tensor.shape[0] < state.world_size:
            tensor = torch.cat([tensor[:1], tensor[:-1]])
        return right(tensor, state)

    return wrong


@breaks("fsdp/fewer-rows-than-ranks", says="is wrong")
class FewRowsAreMixedUp(Swapped):
    swaps = ((sharded_values, "_to_sharded_tensor", _with_the_first_row_twice),)


@breaks("fsdp/sharded-state-dict-on-mesh", says="is wrong")
class ShardsOnAMeshHoldTheNextRows(Swapped):
    swaps = (
        (
            sharded_values,
            "shard_on_mesh",
            lambda right: lambda tensor, mesh: right(tensor.roll(1, 0), mesh),
        ),
    )


def _rolled_for_replicas(right: Any) -> Any:
    def wrong(tensor: torch.Tensor, state: Any) -> Any:
        return right(tensor if state.inter_node_group is None else tensor.roll(1, 0), state)

    return wrong


@breaks("fsdp/sharded-state-dict-hybrid", says="is wrong")
class ShardsOfReplicasHoldTheNextRows(Swapped):
    swaps = ((sharded_values, "_to_sharded_tensor", _rolled_for_replicas),)


def _gathered_and_rolled(right: Any) -> Any:
    def wrong(unit: Any, shard: torch.Tensor) -> torch.Tensor:
        whole: torch.Tensor = right(unit, shard)
        return whole if unit.state.inter_node_group is None else whole.roll(1)

    return wrong


@breaks("fsdp/full-optimizer-state-hybrid", says="is wrong")
class OptimizerStateOfReplicasIsShifted(Swapped):
    swaps = ((optim_save, "_gather", _gathered_and_rolled),)


def _under_the_first_name(right: Any) -> Any:
    def wrong(state: Any, handle: Any, entries: Any, prefix: str) -> None:
        right(state, handle, entries, prefix)
        for tied in handle.metadata.shared:
            entries.pop(f"{prefix}{tied.module_name}.{tied.name}")

    return wrong


@breaks("fsdp/tied-sharded-state-dict", says="keys, and missing ones: rank 0 is wrong")
class TiedShardsAreSavedUnderOneName(Swapped):
    swaps = ((state_dict, "_save_sharded", _under_the_first_name),)
