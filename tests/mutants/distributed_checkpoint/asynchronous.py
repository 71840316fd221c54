"""Mutants of conformance/spec/distributed_checkpoint/asynchronous.py."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch.distributed.checkpoint as dcp

from tests.mutants.distributed_checkpoint.kit import DCP, FunctionMutant
from tests.mutants.kit import breaks
from tests.mutants.replacing import MethodMutant


class Later:
    """A future whose result is that of a call."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.result = call


@breaks("dcp/async-as-of-the-call", says="loaded from checkpoint: ")
class SavesWhenTheResultIsAskedFor(FunctionMutant):
    @staticmethod
    def async_save(right: Any, state: Any, **how: Any) -> Any:
        return Later(lambda: dcp.save(state, **how))


@breaks("dcp/async-as-of-the-call", says=r"at \['last'\]: got 2 values")
class CopiesTensorsAlone(MethodMutant):
    """Objects of other types are those of the caller until they are saved."""

    of = f"{DCP}._state_dict_stager:StateDictStager"

    @staticmethod
    def stage(right: Any, self: Any, state: Any, *args: Any, **how: Any) -> Any:
        held = {name: value for name, value in state.items() if isinstance(value, deque)}
        return {**right(self, state, *args, **how), **held}


@breaks("dcp/async-one-after-another", says="CheckpointException")
class TheSecondGoesWhereTheFirstWent(FunctionMutant):
    @staticmethod
    def async_save(right: Any, state: Any, **how: Any) -> Any:
        return right(state, **{**how, "checkpoint_id": how["checkpoint_id"].replace("/2", "/1")})


@breaks("dcp/async-beside-training", says="Missing key in checkpoint")
class SavesTensorsAloneInAGroup(FunctionMutant):
    @staticmethod
    def async_save(right: Any, state: Any, **how: Any) -> Any:
        kept = state if "process_group" not in how else {k: v for k, v in state.items() if k != "o"}
        return right(kept, **how)


@breaks("dcp/async-error", says=r"result: \(nothing was raised")
class LosesErrors(FunctionMutant):
    @staticmethod
    def async_save(right: Any, state: Any, **how: Any) -> Any:
        future = right(state, **how)

        def result() -> None:
            future.exception()

        return Later(result)
