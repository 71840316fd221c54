"""Mutants of conformance/spec/distributed_checkpoint/layouts.py."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Shard

from tests.mutants.distributed_checkpoint.kit import (
    FunctionMutant,
    SavePlannerMutant,
    clear,
    dtensors,
)
from tests.mutants.kit import breaks
from tests.mutants.replacing import methods_replaced


class LoadsSomeZeros(FunctionMutant):
    """After a load, the DTensors that `is_hit` says are zero."""

    is_hit: Any = None

    @classmethod
    def patched(cls) -> Any:
        def load(right: Any, state: Any, **how: Any) -> None:
            right(state, **how)
            for value in dtensors(state):
                if cls.is_hit(value):
                    clear(value)

        return methods_replaced(cls.of, {"load": load})


@breaks("dcp/written-by-the-lowest-rank", says=r"ranks that wrote: got 4 values, want 1")
class SpreadsWhatAllHave(SavePlannerMutant):
    @staticmethod
    def __init__(right: Any, self: Any, **how: Any) -> None:
        right(self, **{**how, "dedup_save_to_lowest_rank": False})


@breaks("dcp/layouts", says=r"\(7, 5\) from R to 1")
class LoadsNoColumns(LoadsSomeZeros):
    @staticmethod
    def is_hit(tensor: DTensor) -> bool:
        return tensor.placements == (Shard(1),)


@breaks("dcp/layouts-of-two-dimensions", says=r"to 01")
@breaks("dcp/more-ranks", says="w: ")
class LoadsNoBlocks(LoadsSomeZeros):
    @staticmethod
    def is_hit(tensor: DTensor) -> bool:
        return tensor.placements == (Shard(0), Shard(1))


@breaks("dcp/few-rows", says=r"\(2, 3\) from 0 to R")
class LoadsNothingOfShortTensors(LoadsSomeZeros):
    @staticmethod
    def is_hit(tensor: DTensor) -> bool:
        return tensor.size(0) < tensor.device_mesh.size()


@breaks("dcp/whole-and-sharded", says="into a tensor: ")
class LoadsTheFirstRowsOfAShardedTensor(FunctionMutant):
    @staticmethod
    def load(right: Any, state: Any, **how: Any) -> None:
        right(state, **how)
        for value in state.values():
            if isinstance(value, Tensor) and not isinstance(value, DTensor):
                value[2:].zero_()


@breaks("dcp/fewer-ranks", says="w: ")
class LoadsNothingOnThreeRanks(LoadsSomeZeros):
    @staticmethod
    def is_hit(tensor: DTensor) -> bool:
        return tensor.device_mesh.size() == 3


@breaks("dcp/on-some-ranks", says="Missing key in checkpoint")
class SavesNothingWithoutRankZero(FunctionMutant):
    @staticmethod
    def save(right: Any, state: Any, **how: Any) -> Any:
        kept = {
            key: value
            for key, value in state.items()
            if not isinstance(value, DTensor) or 0 in value.device_mesh.mesh
        }
        return right(kept, **how)


@breaks("dcp/partial", says="w: ")
class SavesOnesOwnPartOfASum(FunctionMutant):
    @staticmethod
    def save(right: Any, state: Any, **how: Any) -> Any:
        kept = {
            key: value.to_local()
            if isinstance(value, DTensor) and isinstance(value.placements[0], Partial)
            else value
            for key, value in state.items()
        }
        return right(kept, **how)


@breaks("dcp/any-layout", says=r"to ")
class LoadsNoThirdDimension(LoadsSomeZeros):
    @staticmethod
    def is_hit(tensor: DTensor) -> bool:
        return tensor.ndim == 3
