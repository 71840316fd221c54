"""Mutants of conformance/spec/fsdp/constructor.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from impl import nested_tensors
from impl.fsdp import api
from impl.fsdp.build import groups, materialize
from impl.fsdp.flat_param import handle, views
from impl.fsdp.step import sharding
from tests.mutants.fsdp.kit import Swapped, always
from tests.mutants.kit import breaks


def _without_dataclasses(inputs: Any) -> Iterator[torch.Tensor]:
    if isinstance(inputs, torch.Tensor):
        yield inputs
    elif isinstance(inputs, (dict, list, tuple)):
        for value in inputs.values() if isinstance(inputs, dict) else inputs:
            yield from _without_dataclasses(value)


@breaks("fsdp/inputs-and-outputs", says="raised")
class OverlooksDataclasses(Swapped):
    swaps = ((nested_tensors, "tensors_in", lambda _: _without_dataclasses),)


def _without_names(right: Any) -> Any:
    def wrong(fn: Any, inputs: Any) -> Any:
        if isinstance(inputs, tuple):
            return tuple(wrong(fn, value) for value in inputs)
        if dataclasses.is_dataclass(inputs):
            return inputs
        return right(fn, inputs)

    return wrong


@breaks("fsdp/inputs-and-outputs", says="'tuple' object has no attribute 'x'")
class NamedTuplesLoseTheirNames(Swapped):
    swaps = ((nested_tensors, "_map", _without_names),)


def _of_parameters(right: Any) -> Any:
    def wrong(module: Any, modules: Any, states: Any) -> Any:
        params = [one for one in states or [] if isinstance(one, torch.nn.Parameter)]
        return right(module, modules, params or None)

    return wrong


@breaks("fsdp/ignored-modules", says="ignored weight")
class IgnoredStatesAreParametersAlone(Swapped):
    swaps = ((api, "resolve_ignored", _of_parameters),)


@breaks("fsdp/sync-module-states", says="means of entries")
class BuffersAreNotSynchronized(Swapped):
    swaps = (
        (
            materialize,
            "sync_module_states",
            lambda right: lambda module, *args: right(nn.Module(), *args),
        ),
    )


@breaks("fsdp/sync-module-states-hybrid", says="means of entries")
class SyncsModuleStatesWithinNodesOnly(Swapped):
    """Module states are broadcast only within a sharding group (pytorch#178569)."""

    swaps = (
        (
            materialize,
            "sync_module_states",
            lambda right: (
                lambda module, params, groups, device: right(module, params, groups[-1:], device)
            ),
        ),
    )


def _made_empty(modules: Any, device: Any) -> None:
    for module in modules:
        module.to_empty(device=device, recurse=False)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor.detach().zero_()


@breaks("fsdp/meta-device", says="parameter and buffers|raised")
class MetaModulesAreNotReset(Swapped):
    swaps = ((materialize, "_reset_parameters", lambda _: _made_empty),)


@breaks("fsdp/meta-device", says="parameter and buffers")
class ResetsModulesWithParameters(Swapped):
    """Others are made empty."""

    @staticmethod
    def _sorted_out(right: Any) -> Any:
        def reset(modules: Any, device: Any) -> None:
            modules = list(modules)
            with_own = [m for m in modules if next(m.parameters(recurse=False), None) is not None]
            right(with_own, device)
            _made_empty([m for m in modules if m not in with_own], device)

        return reset

    swaps = ((materialize, "_reset_parameters", _sorted_out),)


@breaks("fsdp/ignored-modules", says="ignored (parameters|weight)|units|zip")
@breaks("fsdp/ignored-in-state-dict", says="types")
@breaks("fsdp/ignored-parameters", says="zip|ignored parameters")
@breaks("fsdp/ignored-instance", says="was to raise")
class IgnoresNothing(Swapped):
    swaps = (
        (api, "resolve_ignored", lambda right: lambda module, *args: right(module, None, None)),
    )


def _with_few_arguments(right: Any) -> Any:
    def wrong(self: Any, module: nn.Module, process_group: Any = None) -> None:
        right(self, module, process_group)

    return wrong


@breaks("fsdp/signature", says="missing or with another default: sharding_strategy")
@breaks("fsdp/annotated-wrapping", says="unexpected keyword argument")
class TakesAModuleAndAGroupAlone(Swapped):
    swaps = ((api.FullyShardedDataParallel, "__init__", _with_few_arguments),)


@breaks("fsdp/transparent", says="has no attribute 'mark'")
class HidesTheModule(Swapped):
    swaps = ((api.FullyShardedDataParallel, "__getattr__", lambda _: nn.Module.__getattr__),)


def _turned(found: list[Any]) -> list[Any]:
    return found[:1] + found[:0:-1]


@breaks("fsdp/instances", says="instances: rank . is wrong")
class ListsTheLastInnerInstanceFirst(Swapped):
    swaps = (
        (
            api.FullyShardedDataParallel,
            "fsdp_modules",
            lambda right: staticmethod(
                lambda module, root_only=False: _turned(right(module, root_only))
            ),
        ),
    )


@breaks("fsdp/param-init-fn", says="calls and values")
class PrefersResetToParamInitFn(Swapped):
    """`param_init_fn` is not called where a module can reset itself."""

    swaps = (
        (
            materialize,
            "materialize",
            lambda right: (
                lambda module, ignored, init, device: right(module, ignored, None, device)
            ),
        ),
    )


@breaks("fsdp/inputs-and-outputs", says="expected to be in states")
class LooksForBareTensors(Swapped):
    """Outputs in containers are not found."""

    swaps = (
        (
            nested_tensors,
            "tensors_in",
            lambda _: lambda value: [value] if isinstance(value, torch.Tensor) else [],
        ),
    )


@breaks("fsdp/replaced-parameters", says="cannot be converted to Scalar|outputs: rank . is wrong")
class OverlooksReplacedParameters(Swapped):
    swaps = ((sharding, "write_back_orig_params", always(False)),)


@breaks("fsdp/device-mesh", says="is wrong")
class ShardsOverTheDefaultGroup(Swapped):
    """A mesh of one dimension is taken for all ranks."""

    swaps = ((groups, "_plain_group", lambda right: lambda group, mesh: right(group, None)),)


def _the_other_way_round(right: Any) -> Any:
    def wrong(process_group: Any, mesh: Any, device: Any) -> Any:
        found = right(process_group, mesh, device)
        return found if mesh is None else found[::-1]

    return wrong


@breaks("fsdp/device-mesh-hybrid", says="elements that a rank holds")
class ShardsOverTheFirstDimension(Swapped):
    swaps = ((groups, "_hybrid_groups", _the_other_way_round),)


@breaks("fsdp/past-setattr", says="=1: calls of __setattr__")
class IgnoresUnsafeSetattr(Swapped):
    """The variable in the environment goes by another name."""

    swaps = ((handle, "ENV_UNSAFE_SETATTR", lambda _: "FSDP_UNSAFE_SETATTR"),)


@breaks("fsdp/past-setattr", says="=0: calls of __setattr__")
class AlwaysUsesUnsafeSetattr(Swapped):
    swaps = ((views, "_uses_plain_attributes", lambda _: lambda module: True),)
