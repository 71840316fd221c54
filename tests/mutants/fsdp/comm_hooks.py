"""Mutants of conformance/spec/fsdp/comm_hooks.py."""

from __future__ import annotations

from typing import Any

import torch

from impl.fsdp import api
from impl.fsdp.step import reduction
from tests.mutants.fsdp.kit import Swapped, nothing
from tests.mutants.kit import breaks


@breaks("fsdp/comm-hook", says="calls and gradients")
@breaks("fsdp/comm-hook-no-shard", says="calls and gradients")
@breaks("fsdp/comm-hook-refused", says="was to raise")
class HooksAreNotCalled(Swapped):
    swaps = ((api.FullyShardedDataParallel, "register_comm_hook", nothing),)


def _averaged_again(right: Any) -> Any:
    def wrong(state: Any, handle: Any, shard: torch.Tensor) -> None:
        if state.comm_hook is not None:
            shard.div_(state.world_size)
        right(state, handle, shard)

    return wrong


@breaks("fsdp/default-hooks", says="is wrong")
class AveragesWhatAHookHasAveraged(Swapped):
    swaps = ((reduction, "_finish", _averaged_again),)


def _halved_first(right: Any) -> Any:
    def wrong(state: Any, handle: Any, computed: torch.Tensor) -> None:
        if state.comm_hook is not None:
            computed = computed * (handle.world_size / 2)
        right(state, handle, computed)

    return wrong


@breaks("fsdp/default-hooks", says="is wrong")
class AHookAveragesOverTwoRanks(Swapped):
    """What a hook averages over all ranks is right for two ranks alone."""

    swaps = ((reduction, "_reduce_scatter", _halved_first),)
