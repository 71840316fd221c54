"""Mutants of conformance/spec/fsdp/answers.py."""

from __future__ import annotations

from typing import Any

import torch

from impl.fsdp import FullyShardedDataParallel as Fsdp
from impl.fsdp.checkpoint import optim_api, state_dict_type
from impl.fsdp.step import grad_norm
from tests.mutants.fsdp.kit import Swapped
from tests.mutants.kit import breaks


def _without_result(right: Any) -> Any:
    def wrong(*args: Any, **kwargs: Any) -> None:
        right(*args, **kwargs)

    return wrong


@breaks("fsdp/returns-itself", says="return the model")
class ApplyReturnsNothing(Swapped):
    swaps = ((Fsdp, "apply", _without_result),)


def _in_training(right: Any) -> Any:
    def wrong(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        right(self, module, *args, **kwargs)
        self.train()

    return wrong


@breaks("fsdp/modes-are-kept", says="modes: at")
class WrapsForTraining(Swapped):
    """Whatever is wrapped is in training then."""

    swaps = ((Fsdp, "__init__", _in_training),)


@breaks("fsdp/earlier-state-dict-type", says="types before|raised")
class ReturnsTheNewSettings(Swapped):
    @staticmethod
    def _new(right: Any) -> Any:
        def wrong(module: Any, *args: Any, **kwargs: Any) -> Any:
            right(module, *args, **kwargs)
            return Fsdp.get_state_dict_type(module)

        return staticmethod(wrong)

    swaps = ((state_dict_type.StateDictTypeMethods, "set_state_dict_type", _new),)


def _taking_out(right: Any) -> Any:
    def wrong(states: Any, *args: Any, **kwargs: Any) -> Any:
        result = right(states, *args, **kwargs)
        states.pop("param_groups")
        return result

    return wrong


@breaks("fsdp/callers-state-dicts", says="optimizer's: ")
class TakesApartWhatItLoads(Swapped):
    swaps = ((optim_api, "load_optim_state", _taking_out),)


def _finite(right: Any) -> Any:
    def wrong(*args: Any) -> Any:
        norm = right(*args)
        return None if norm is None else torch.nan_to_num(norm)

    return wrong


@breaks("fsdp/norm-of-what-overflows", says="norm of gradients with")
class LeavesOutWhatOverflows(Swapped):
    swaps = ((grad_norm, "_local_norm", _finite),)
