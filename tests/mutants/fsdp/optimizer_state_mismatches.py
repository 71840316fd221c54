"""Mutants of conformance/spec/fsdp/optimizer_state_mismatches.py."""

from __future__ import annotations

from typing import Any

from impl.fsdp import api
from impl.fsdp.checkpoint import optim_load, optim_save
from tests.mutants.fsdp.kit import Swapped
from tests.mutants.kit import breaks


def _without_a_word(right: Any) -> Any:
    def wrong(*args: Any, **kwargs: Any) -> Any:
        try:
            return right(*args, **kwargs)
        except RuntimeError:
            return [], {}

    return wrong


@breaks("fsdp/optimizer-state-missing", says="was to raise")
class SavesWhatAllHave(Swapped):
    swaps = ((optim_save, "agree_on_keys", _without_a_word),)


def _of_known_names(right: Any) -> Any:
    def wrong(state: Any, param_groups: Any, params: Any, names: Any) -> Any:
        known = {name for found in names.names_of.values() for name in found}
        kept = [
            {**group, "params": [name for name in group["params"] if name in known]}
            for group in param_groups
        ]
        return right(state, kept, params, names)

    return wrong


@breaks("fsdp/optimizer-state-of-nobody", says="was to raise")
class DropsUnknownNames(Swapped):
    swaps = ((optim_load, "_rekey", _of_known_names),)


def _with_zeros(right: Any) -> Any:
    def wrong(unit: Any, name: str, values: list[Any]) -> Any:
        shapes = [param.shape for param in unit.handle.metadata.params]
        fitting = [
            value if value is None or value.shape == shape else value.new_zeros(shape)
            for value, shape in zip(values, shapes, strict=True)
        ]
        return right(unit, name, fitting)

    return wrong


def _after_forgetting(right: Any) -> Any:
    def wrong(model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        for state in optimizer.state.values():
            state["exp_avg"].zero_()
        return right(model, optimizer, *args, **kwargs)

    return staticmethod(wrong)


@breaks("fsdp/optimizer-state-of-wrong-shape", says="the optimizer was changed")
class ForgetsBeforeItLoads(Swapped):
    """The state that an optimizer has is dropped before the new one was looked at."""

    swaps = ((api.FullyShardedDataParallel, "optim_state_dict_to_load", _after_forgetting),)


@breaks("fsdp/optimizer-state-of-wrong-shape", says="was to raise")
class BeginsAnewWhereShapesDiffer(Swapped):
    swaps = ((optim_load, "_flatten_tensors", _with_zeros),)
