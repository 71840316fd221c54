"""Mutants of conformance/spec/fsdp/optimizer_state.py."""

from __future__ import annotations

import copy
from typing import Any

import torch.distributed as dist
from torch import Tensor

from impl.fsdp.checkpoint import optim_api, optim_load, optim_names, optim_save
from impl.fsdp.checkpoint.optim_names import describe_model
from impl.fsdp.flat_param import packing as flat_param
from tests.mutants.fsdp.kit import Swapped, rolled_afterwards
from tests.mutants.kit import breaks


@breaks("fsdp/optimizer-state-on-rank-0", says=r"\d\d entries")
class EveryRankGetsTheState(Swapped):
    swaps = (
        (
            optim_api,
            "SaveOptions",
            lambda right: lambda rank0_only, **options: right(rank0_only=False, **options),
        ),
    )


def _with_its_own_options(right: Any) -> Any:
    def wrong(state: Any, model: Any, optimizer: Any, *args: Any, **how: Any) -> Any:
        loaded = right(state, model, optimizer, *args, **how)
        if how["rank0_only"] and optimizer is not None and dist.get_rank() > 0:
            for group, own in zip(loaded["param_groups"], optimizer.param_groups, strict=True):
                group.update({k: v for k, v in own.items() if k != "params"})
        return loaded

    return wrong


@breaks("fsdp/optimizer-options-from-rank-0", says="learning rates")
class OtherRanksKeepTheirOptions(Swapped):
    """Ranks other than 0 load the options of their own optimizers."""

    swaps = ((optim_api, "load_optim_state", _with_its_own_options),)


@breaks("fsdp/optimizer-state-of-units-and-the-bare-module", says="is wrong")
class ParametersOfAUnitShareTheirStep(Swapped):
    """All parameters of a unit share one step count, as in torch 2.13: loading it counts once for
    each of them."""

    swaps = ((optim_save, "_copied", lambda _: lambda state: state),)


def _of_all(right: Any) -> Any:
    def wrong(unit: Any, states: Any, options: Any) -> Any:
        return right(unit, {name: states.get(name, {}) for name in unit.names}, options)

    return wrong


@breaks("fsdp/frozen-have-no-state", says="names with state")
class FrozenParametersHaveEmptyState(Swapped):
    swaps = ((optim_save, "_gather_orig_states", _of_all),)


def _with_the_first_settings(right: Any) -> Any:
    def wrong(*args: Any) -> Any:
        loaded = right(*args)
        first = loaded["param_groups"][0]
        groups = [{**first, "params": group["params"]} for group in loaded["param_groups"]]
        return {**loaded, "param_groups": groups}

    return wrong


@breaks("fsdp/parameter-groups", says="groups: rank . is wrong")
class AllGroupsHaveTheFirstOnesSettings(Swapped):
    swaps = ((optim_load, "_rekey", _with_the_first_settings),)


@breaks("fsdp/optimizer-state-channels-last", says="came back to its place")
class FlattensOptimizerStateAsContiguous(Swapped):
    """Optimizer state is flattened in row-major order, whatever the memory format, as in torch
    2.13."""

    swaps = (
        (
            flat_param.FlatMetadata,
            "flatten_one",
            lambda _: lambda self, index, tensor: tensor.reshape(-1),
        ),
    )


@breaks("fsdp/full-optimizer-state", says="is wrong")
@breaks("fsdp/full-optimizer-state-offloaded", says="is wrong")
@breaks("fsdp/optimizer-state-and-the-bare-module", says="is wrong")
class OptimizerStateIsShifted(Swapped):
    swaps = ((optim_save, "_gather", rolled_afterwards),)


@breaks("fsdp/full-optimizer-state-original", says="is wrong")
class OptimizerStateOfOriginalParametersIsShifted(Swapped):
    swaps = (
        (
            optim_save,
            "_finished",
            lambda right: lambda unit, value, options: right(unit, value.roll(1, 0), options),
        ),
    )


@breaks("fsdp/optimizer-state-loads", says="differences")
@breaks("fsdp/optimizer-loads-directly", says="is wrong")
@breaks("fsdp/checkpoint", says="is wrong")
@breaks("fsdp/older-optimizer-functions", says="differences")
@breaks("fsdp/exchanges-full-with-torch", says="is wrong")
class OptimizerStateIsLoadedShifted(Swapped):
    swaps = ((optim_load, "_flatten_tensors", rolled_afterwards),)


def _of_the_first(right: Any) -> Any:
    first: dict[str, Any] = {}

    def agreed(param: str, infos: Any) -> Any:
        return {name: first.setdefault(name, v) for name, v in right(param, infos).items()}

    return agreed


@breaks("fsdp/full-optimizer-state-original", says="steps: rank 0 is wrong")
class OneStepForAllParameters(Swapped):
    """The steps of all parameters are those of the first one."""

    swaps = ((optim_save, "_agreed_others", _of_the_first),)


def _but_ignored(right: Any) -> Any:
    def wrong(names: Any, key: Any, *args: Any) -> Any:
        return right(names, key, *args) if key.is_managed else None

    return wrong


@breaks("fsdp/optimizer-state-loads", says="differences beside ignored, FULL")
class LoadsNoStateOfIgnoredParameters(Swapped):
    """What FSDP does not manage gets no state when a state dict is loaded."""

    swaps = ((optim_load, "_value_for_rank", _but_ignored),)


def _without_ignored(right: Any) -> Any:
    def wrong(model: Any, *args: Any, **how: Any) -> Any:
        result = right(model, *args, **how)
        known = describe_model(model).unit_of
        for name in result.get("state", {}):
            if name not in known:
                result["state"][name] = {}
        return result

    return wrong


@breaks("fsdp/optimizer-state-loads", says="differences beside ignored, FULL")
class SavesNoStateOfIgnoredParameters(Swapped):
    """What FSDP does not manage has an empty state in a state dict."""

    swaps = ((optim_api, "save_optim_state", _without_ignored),)


def _in_its_memory(right: Any) -> Any:
    def wrong(unit: Any, name: str, state: Any) -> Any:
        result = right(unit, name, state)
        part = unit.handle.shard_layout.params[unit.index_of[name]]
        for key in result or ():
            if type(state[key]) is Tensor and state[key].dim() > 0:
                result[key] = state[key].reshape(-1)[part.start : part.end]
        return result

    return wrong


@breaks("fsdp/optimizer-state-loads", says=r"changes of the loaded[\s\S]*exp_avg")
class LoadsViewsOfTheStateDict(Swapped):
    """Moments of original parameters are loaded as parts of the state dict, and so overwritten."""

    swaps = ((optim_load, "_shard_orig_state", _in_its_memory),)


def _as_it_is(right: Any) -> Any:
    def wrong(unit: Any, name: str, values: list[Any]) -> Any:
        result = right(unit, name, values)
        return values[0] if result.dim() == 0 else result

    return wrong


@breaks("fsdp/optimizer-state-loads", says=r"changes of the loaded[\s\S]*\.step")
class CountsStepsInTheStateDict(Swapped):
    """The count of steps that is loaded is the one of the state dict."""

    swaps = ((optim_load, "_flatten_values", _as_it_is),)


class _NoCopies:
    """The module `copy`, whose copies are what was to be copied."""

    copy = staticmethod(copy.copy)

    @staticmethod
    def deepcopy(value: Any) -> Any:
        return value


@breaks("fsdp/parameter-groups", says="saved learning rates")
class SavesTheOptimizersOwnGroups(Swapped):
    """Options in a state dict change with those of the optimizer."""

    swaps = ((optim_save, "copy", lambda _: _NoCopies),)


@breaks("fsdp/parameter-groups", says="saved learning rates")
class LoadsTheGroupsOfTheStateDict(Swapped):
    """Options that were loaded are those of the state dict, which change with them."""

    swaps = ((optim_load, "copy", lambda _: _NoCopies),)


def _without_module(right: Any) -> Any:
    return lambda name: right(name).replace("module.", "")


@breaks("fsdp/full-optimizer-state", says="names: rank 0 is wrong|KeyError")
class LayersAreNotCalledModule(Swapped):
    """Of names, what a wrapper's own attribute might be called is left out."""

    swaps = ((optim_names, "clean_tensor_name", _without_module),)
