"""Mutants of conformance/spec/distributed_checkpoint/values.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from tests.mutants.distributed_checkpoint.kit import (
    FunctionMutant,
    LoadPlannerMutant,
    ReaderMutant,
    SavePlannerMutant,
    WriterMutant,
)
from tests.mutants.kit import breaks
from tests.mutants.replacing import MethodMutant


@breaks("dcp/dtypes", says=r"loaded: at \['bool'\]")
class LoadsBoolsAsTrue(FunctionMutant):
    @staticmethod
    def load(right: Any, state: Any, **how: Any) -> None:
        right(state, **how)
        for value in state.values():
            if isinstance(value, Tensor) and value.dtype == torch.bool:
                value.fill_(True)


@breaks("dcp/shapes", says=r"into strided tensors: at \['\w+'\]")
class FillsCopiesOfStridedTensors(LoadPlannerMutant):
    @staticmethod
    def resolve_tensor(right: Any, self: Any, item: Any) -> Any:
        return right(self, item).contiguous()


@breaks("dcp/objects", says=r"loaded: at \['pair'\]: got list")
class LoadsTuplesAsLists(FunctionMutant):
    @staticmethod
    def load(right: Any, state: Any, **how: Any) -> None:
        right(state, **how)
        for key, value in state.items():
            if type(value) is tuple:
                state[key] = list(value)


@breaks("dcp/nested", says=r"loaded: at \['model'\]\['layers'\]\[1\]")
class FillsListsWithTheirFirstEntry(FunctionMutant):
    @staticmethod
    def load(right: Any, state: Any, **how: Any) -> None:
        right(state, **how)
        for value in state.values():
            if isinstance(value, dict) and "layers" in value:
                value["layers"][:] = value["layers"][:1] * len(value["layers"])


@breaks("dcp/numbers-for-keys", says=r"loaded: at \['state'\]")
class TakesNumbersForTexts(FunctionMutant):
    """As torch does."""


@breaks("dcp/keys", says="Missing key in checkpoint")
class TakesSlashesForUnderscores(FunctionMutant):
    @staticmethod
    def save(right: Any, state: Any, **how: Any) -> Any:
        return right({key.replace("/", "_"): value for key, value in state.items()}, **how)


@breaks("dcp/keys-like-paths", says="CheckpointException")
class DropsAKeyThatIsLikeAPath(FunctionMutant):
    @staticmethod
    def save(right: Any, state: Any, **how: Any) -> Any:
        kept = {k: v for k, v in state.items() if "." not in k or k.partition(".")[0] not in state}
        return right(kept, **how)


@breaks("dcp/own-keys", says="CheckpointException")
class SavesWhatRankZeroHas(SavePlannerMutant):
    @staticmethod
    def create_local_plan(right: Any, self: Any) -> Any:
        plan = right(self)
        return plan if self.is_coordinator else type(plan)([])


@breaks("dcp/in-place", says=r"is the same: at \[0\]")
@breaks("dcp/parameters-in-place", says="is the same: got False")
class LoadsIntoNewTensors(FunctionMutant):
    @staticmethod
    def load(right: Any, state: Any, **how: Any) -> None:
        right(state, **how)
        for key, value in state.items():
            if isinstance(value, Tensor):
                state[key] = value.detach().clone().requires_grad_(value.requires_grad)


@breaks("dcp/a-part", says="keys are left over")
class RefusesToLoadAPart(LoadPlannerMutant):
    @staticmethod
    def create_local_plan(right: Any, self: Any) -> Any:
        if set(self.metadata.state_dict_metadata) - set(self.state_dict):
            raise ValueError("keys are left over")
        return right(self)


@breaks("dcp/partial-load", says=r"loaded: at \['new'\]")
class ClearsWhatIsMissing(FunctionMutant):
    @staticmethod
    def load(right: Any, state: Any, **how: Any) -> None:
        right(state, **how)
        if "planner" in how:
            state["new"].zero_()


@breaks("dcp/missing-key", says=r"\(nothing was raised")
class SkipsMissingKeys(LoadPlannerMutant):
    @staticmethod
    def __init__(right: Any, self: Any, *args: Any, **how: Any) -> None:
        right(self, *args, **{**how, "allow_partial_load": True})


@breaks("dcp/other-size", says="loading: ")
@breaks("dcp/other-size-of-dtensors", says="loading: ")
@breaks("dcp/no-checkpoint-is-named", says="loading: ")
class ErrorsOfALoadSayNothing(FunctionMutant):
    @staticmethod
    def load(right: Any, state: Any, **how: Any) -> None:
        try:
            right(state, **how)
        except CheckpointException:
            raise CheckpointException("it failed", {}) from None


@breaks("dcp/failure-changes-nothing", says="what it was to be loaded into")
class FillsWithNumbersFirst(FunctionMutant):
    @staticmethod
    def load(right: Any, state: Any, **how: Any) -> None:
        for value in state.values():
            if isinstance(value, Tensor):
                value.fill_(-1)
        right(state, **how)


@breaks("dcp/other-dtype", says="loaded: ")
class ReadsNoFloatsAsDoubles(FunctionMutant):
    @staticmethod
    def load(right: Any, state: Any, **how: Any) -> None:
        right(state, **how)
        for value in state.values():
            if isinstance(value, Tensor) and value.dtype == torch.float64:
                value.zero_()


@breaks("dcp/no-checkpoint", says=r"\(nothing was raised")
class LoadsNothingFromNowhere(FunctionMutant):
    @staticmethod
    def load(right: Any, state: Any, **how: Any) -> None:
        if Path(how["checkpoint_id"]).exists():
            right(state, **how)


@breaks("dcp/saved-again", says=r"loaded: at \['a'\]")
class KeepsTheFirstCheckpoint(FunctionMutant):
    @staticmethod
    def save(right: Any, state: Any, **how: Any) -> Any:
        is_there = (Path(how["checkpoint_id"]) / ".metadata").exists()
        return None if is_there else right(state, **how)


@breaks("dcp/not-overwritten", says=r"saving: \(nothing was raised")
class AlwaysOverwrites(WriterMutant):
    @staticmethod
    def prepare_local_plan(right: Any, self: Any, plan: Any) -> Any:
        self.overwrite = True
        return right(self, plan)


@breaks("dcp/a-rank-fails", says=r"RANK 0")
class BlamesRankZero(FunctionMutant):
    @staticmethod
    def save(right: Any, state: Any, **how: Any) -> Any:
        try:
            return right(state, **how)
        except CheckpointException as error:
            first = next(iter(error.failures.values()))
            raise CheckpointException("it failed", {0: first}) from None


@breaks("dcp/both-ranks-fail", says=r"saving: ")
class TellsTheFirstFailureAlone(FunctionMutant):
    @staticmethod
    def save(right: Any, state: Any, **how: Any) -> Any:
        try:
            return right(state, **how)
        except CheckpointException as error:
            first = dict([next(iter(error.failures.items()))])
            raise CheckpointException("it failed", first) from None


@breaks("dcp/alone", says="CheckpointException")
class SavesNothingAlone(FunctionMutant):
    @staticmethod
    def save(right: Any, state: Any, **how: Any) -> Any:
        return None if how.get("no_dist") else right(state, **how)


@breaks("dcp/stateful", says=r"state: at \[2\]: got 2, want 1")
class LoadsStatesTwice(FunctionMutant):
    @staticmethod
    def load(right: Any, state: Any, **how: Any) -> None:
        right(state, **how)
        for value in state.values():
            if hasattr(value, "load_state_dict"):
                value.load_state_dict(value.state_dict())


@breaks("dcp/files", says="CheckpointException")
class WritesTheFirstOfSeveralFiles(WriterMutant):
    @staticmethod
    def write_data(right: Any, self: Any, plan: Any, planner: Any) -> Any:
        if not self.single_file_per_rank:
            plan = type(plan)(plan.items[:1], plan.storage_data, plan.planner_data)
        return right(self, plan, planner)


@breaks("dcp/written-once", says="bytes for")
class EveryRankWritesACopy(FunctionMutant):
    @staticmethod
    def save(right: Any, state: Any, **how: Any) -> Any:
        copies = {f"{key} of rank {dist.get_rank()}": value for key, value in state.items()}
        return right({**state, **copies}, **how)


@breaks("dcp/views", says="bytes for")
class WritesTheBaseOfAView(FunctionMutant):
    @staticmethod
    def save(right: Any, state: Any, **how: Any) -> Any:
        found = right(state, **how)
        tensors = [value for value in state.values() if isinstance(value, Tensor)]
        size = max((x.untyped_storage().nbytes() for x in tensors), default=0)
        if size > max((x.nbytes for x in tensors), default=size):
            (Path(how["checkpoint_id"]) / f"base{dist.get_rank()}").write_bytes(bytes(size))
        return found


@breaks("dcp/metadata", says=r"w: at \[1\]")
class MetadataSayFloat(ReaderMutant):
    @staticmethod
    def read_metadata(right: Any, self: Any, *args: Any, **how: Any) -> Any:
        found = right(self, *args, **how)
        for value in found.state_dict_metadata.values():
            if hasattr(value, "properties"):
                value.properties.dtype = torch.float32
        return found


@breaks("dcp/no-code-in-tensors", says="code of the file ran")
class UnpicklesWhatIsThere(MethodMutant):
    of = "torch"

    @staticmethod
    def load(right: Any, *args: Any, **how: Any) -> Any:
        return right(*args, **{**how, "weights_only": False})


@breaks("dcp/subgroup", says="CheckpointException")
class ForgetsTheLastRankOfASubgroup(SavePlannerMutant):
    @staticmethod
    def create_local_plan(right: Any, self: Any) -> Any:
        plan = right(self)
        is_last = dist.get_world_size() == 3 and dist.get_rank() == 2
        return type(plan)([]) if is_last else plan
