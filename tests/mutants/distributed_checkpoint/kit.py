"""Which functions and classes mutants of distributed checkpoints replace; and some that keep all
rules."""

from __future__ import annotations

import copy
import io
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.tensor import DTensor

from tests.mutants.kit import Patch
from tests.mutants.replacing import MethodMutant, methods_replaced

DCP = "torch.distributed.checkpoint"
FAMILY = f"{DCP}.state_dict"


class FunctionMutant(MethodMutant):
    """Replaces `save`, `load` or `async_save`."""

    of = DCP


class SavePlannerMutant(MethodMutant):
    of = f"{DCP}:DefaultSavePlanner"


class LoadPlannerMutant(MethodMutant):
    of = f"{DCP}:DefaultLoadPlanner"


class WriterMutant(MethodMutant):
    of = f"{DCP}.filesystem:_FileSystemWriter"


class ReaderMutant(MethodMutant):
    of = f"{DCP}:FileSystemReader"


class FamilyMutant(MethodMutant):
    """Replaces functions of the family of `get_state_dict`."""

    of = FAMILY


def dtensors(state: dict[str, Any]) -> list[DTensor]:
    return [value for value in state.values() if isinstance(value, DTensor)]


def clear(tensor: DTensor) -> None:
    """This rank's part of it becomes zero."""
    tensor.to_local().detach().zero_()


@contextmanager
def repaired() -> Iterator[None]:
    """Checkpoints that keep the rules that torch's break."""
    with (
        methods_replaced(DCP, {"load": with_texts_for_keys}),
        methods_replaced(ReaderMutant.of, {"read_data": with_checksums}),
        methods_replaced(WriterMutant.of, {"prepare_local_plan": forgetting_the_one_before}),
        methods_replaced(FAMILY, {"get_optimizer_state_dict": leaving_no_states}),
    ):
        yield


def with_texts_for_keys(right: Any, state: Any, **how: Any) -> None:
    def renamed(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(key): renamed(inner) for key, inner in value.items()}
        return value

    def take_back(into: Any, loaded: Any) -> None:
        for key, inner in into.items():
            if isinstance(inner, dict):
                take_back(inner, loaded[str(key)])
            else:
                into[key] = loaded[str(key)]

    by_text = renamed(state)
    right(by_text, **how)
    take_back(state, by_text)


def with_checksums(right: Any, self: Any, plan: Any, planner: Any) -> Any:
    for item in plan.items:
        place = self.storage_data[item.storage_index]
        data = (Path(self.path) / place.relative_path).read_bytes()
        record = data[place.offset : place.offset + place.length]
        if zipfile.ZipFile(io.BytesIO(record)).testzip():
            raise ValueError(f"{place.relative_path} is damaged")
    return right(self, plan, planner)


def forgetting_the_one_before(right: Any, self: Any, plan: Any) -> Any:
    """Before data are overwritten; a checkpoint without metadata is none."""
    found = right(self, plan)
    Path(self.path, ".metadata").unlink(missing_ok=True)
    return found


def leaving_no_states(right: Any, model: Any, optimizer: Any, **how: Any) -> Any:
    had_states = bool(optimizer.state)
    found = right(model, optimizer, **how)
    if not had_states:
        found = copy.deepcopy(found)
        optimizer.state.clear()
    return found


class Repaired(Patch):
    """No mutant, but a target that keeps all rules of checkpoints."""

    patched = staticmethod(repaired)
