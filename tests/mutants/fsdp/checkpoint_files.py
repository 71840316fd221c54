"""Mutants of conformance/spec/fsdp/checkpoint_files.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from impl.fsdp.checkpoint import state_dict
from tests.mutants.fsdp.kit import Swapped
from tests.mutants.kit import breaks


def _dealt(world_size: int, rows: int) -> Tensor:
    """The rows in the order in which they are dealt out in turns."""
    return torch.cat([torch.arange(rank, rows, world_size) for rank in range(world_size)])


def _dealing(right: Any) -> Any:
    def wrong(value: Tensor, state: Any, **kwargs: Any) -> Any:
        return right(value[_dealt(state.world_size, value.shape[0])], state, **kwargs)

    return wrong


def _collecting(right: Any) -> Any:
    def wrong(value: Any, state: Any) -> Tensor:
        rows: Tensor = right(value, state)
        return rows[_dealt(state.world_size, rows.shape[0]).argsort()]

    return wrong


@breaks("fsdp/reshards", says="is wrong")
class ShardsRowsRoundRobin(Swapped):
    """Which row is where depends on the number of ranks, and nothing says so."""

    swaps = (
        (state_dict, "shard_rows", _dealing),
        (state_dict, "unshard_rows", _collecting),
    )
