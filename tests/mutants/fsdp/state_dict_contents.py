"""Mutants of conformance/spec/fsdp/state_dict_contents.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from impl.fsdp import common
from impl.fsdp.checkpoint import optim_api, optim_save, state_dict
from impl.fsdp.phases import GradientPhase
from tests.mutants.fsdp.kit import Swapped, nothing
from tests.mutants.kit import breaks


def _as_the_last_one(right: Any) -> Any:
    def wrong(state: Any, saved: dict[str, Any], prefix: str) -> None:
        right(state, saved, prefix)
        names = [common.clean_tensor_name(name) for name, _ in state.module.named_buffers()]
        keys = [prefix + name for name in names]
        floating = [key for key in keys if key in saved and saved[key].is_floating_point()]
        for key in floating:
            saved[key] = saved[key].to(saved[floating[-1]].dtype)

    return wrong


@breaks("fsdp/buffers-of-several-dtypes", says="dtypes .* want")
class SavesBuffersInTheLastOnesDtype(Swapped):
    swaps = ((state_dict, "_save_buffers", _as_the_last_one),)


def _and_the_others(right: Any) -> Any:
    def wrong(state: Any, saved: dict[str, Any], prefix: str) -> None:
        right(state, saved, prefix)
        for name, buffer in state.module.named_buffers():
            saved.setdefault(prefix + common.clean_tensor_name(name), buffer.clone())

    return wrong


@breaks("fsdp/buffers-that-are-not-persistent", says="keys, and missing ones: rank 0 is wrong")
class SavesWhatIsNotPersistent(Swapped):
    swaps = ((state_dict, "_save_buffers", _and_the_others),)


def _without(is_left_out: Any) -> Any:
    """Makes the hook after saving drop entries, by key and value."""

    def make(right: Any) -> Any:
        def wrong(wrapper: nn.Module, saved: dict[str, Any], prefix: str, metadata: Any) -> None:
            right(wrapper, saved, prefix, metadata)
            for key in [key for key in saved if is_left_out(key, saved[key])]:
                del saved[key]

        return wrong

    return make


@breaks("fsdp/extra-state", says="_extra_state")
class SavesNoExtraState(Swapped):
    swaps = ((state_dict, "_after_save", _without(lambda key, _: key.endswith("_extra_state"))),)


@breaks(
    "fsdp/state-dict-hooks-of-modules", says="keys, entries found and left over: rank 0 is wrong"
)
class SavesOnlyWhatItKnows(Swapped):
    swaps = (
        (
            state_dict,
            "_after_save",
            _without(lambda key, value: isinstance(value, Tensor) and "version" in key),
        ),
    )


def _afresh(right: Any) -> Any:
    def wrong(wrapper: nn.Module, prefix: str, keep_vars: bool) -> None:
        handle = state_dict._state(wrapper).handle
        if handle is not None and handle.gradient_progress.phase is GradientPhase.UNSHARDED:
            handle.flat_param.grad = None
        right(wrapper, prefix, keep_vars)

    return wrong


@breaks("fsdp/saved-while-accumulating", says="is wrong")
class SavingDropsWhatWasAccumulated(Swapped):
    swaps = ((state_dict, "_before_save", _afresh),)


@breaks("fsdp/optimizer-state-of-no-parameter", says="saved and loaded state")
class SavesStateOfParametersAlone(Swapped):
    swaps = ((optim_save, "_add_user_state", nothing),)


def _from_rank_0(right: Any) -> Any:
    def wrong(*args: Any, **kwargs: Any) -> Any:
        group = args[4]
        torch.distributed.broadcast(torch.zeros(1), 0, group=group or dist.group.WORLD)
        return right(*args, **kwargs)

    return wrong


@breaks("fsdp/optimizer-state-in-a-group", says="Global rank 0 is not part of group")
class AsksTheFirstRankOfAll(Swapped):
    swaps = ((optim_api, "save_optim_state", _from_rank_0),)


def _to_the_first_of_all(right: Any) -> Any:
    def wrong(*args: Any, **kwargs: Any) -> Any:
        saved = right(*args, **kwargs)
        return {} if args[5].rank0_only and dist.get_rank() else saved

    return wrong


@breaks("fsdp/optimizer-state-in-a-group", says='must have the keys "state"')
class TheFirstRankOfAllHasTheState(Swapped):
    swaps = ((optim_api, "save_optim_state", _to_the_first_of_all),)
