"""Ignored modules, parameters and buffers; the parameters that FSDP manages, and checks of them."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from impl.fsdp.common import (
    FLAT_PARAM,
    clean_tensor_name,
    is_flattened,
    named_parameters_with_duplicates,
)
from impl.fsdp.step.state import FSDPState, is_replicated, state_of


@dataclass(frozen=True)
class Ignored:
    modules: set[nn.Module]
    params: set[nn.Parameter]
    buffer_names: set[str]  # clean names, seen from the wrapped module


def resolve_ignored(
    module: nn.Module,
    ignored_modules: Iterable[nn.Module] | None,
    ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None,
) -> Ignored:
    """What is excluded by the constructor's arguments and by nested instances.

    Raises:
        ValueError: if both arguments are given, hold a mixture of types, or an FSDP instance.
        TypeError: if `ignored_modules` is no iterable of modules.
    """
    if ignored_modules is not None and ignored_states is not None:
        raise ValueError(
            "Cannot pass both ignored_modules and ignored_states at the same time. Please just "
            "pass ignored_states."
        )
    params: list[nn.Parameter] = []
    modules: list[nn.Module] = []
    if ignored_states is not None:
        given: list[Any] = list(ignored_states)
        _check_uniform(given)
        if given and isinstance(given[0], nn.Parameter):
            params = given
        else:
            modules = given
    elif ignored_modules is not None:
        modules = _as_module_list(ignored_modules)
    nested = [state for state in map(state_of, module.modules()) if state is not None]
    all_modules = _with_submodules(module, modules, nested)
    return Ignored(
        all_modules,
        _params(all_modules, params, nested),
        _buffer_names(module, all_modules, nested),
    )


def managed_params(module: nn.Module, ignored: set[nn.Parameter]) -> Iterator[nn.Parameter]:
    """The parameters in `module` that are neither ignored nor part of a flat parameter yet."""
    for param in module.parameters():
        if param not in ignored and not is_flattened(param):
            yield param


def check_no_scalars(module: nn.Module, params: Iterable[nn.Parameter]) -> None:
    """Raise ValueError for a parameter without dimensions: it could not be sharded."""
    for param in params:
        if param.dim() == 0:
            name = next(name for name, other in module.named_parameters() if other is param)
            raise ValueError(
                "FSDP doesn't support scalar parameters. "
                f"Change {name} to a 1D tensor with numel equal to 1."
            )


def check_not_shared_with_nested(module: nn.Module, ignored: set[nn.Parameter]) -> None:
    """Raise ValueError for a parameter that a nested instance has taken, but `module` uses too.

    Two instances cannot shard one parameter. (torch 2.13 makes two parameters of it.)
    """
    pending = deque([("", module)])
    seen = {module}
    while pending:
        prefix, current = pending.popleft()
        for name, param in current._parameters.items():
            if param is None or param in ignored or name == FLAT_PARAM:
                continue
            if is_flattened(param):
                raise ValueError(
                    f"The parameter {prefix}{name} is shared with a nested FSDP instance. Shared "
                    "parameters must belong to one instance: wrap the lowest common parent module "
                    "instead."
                )
        for name, child in current._modules.items():
            if child is not None and child not in seen and state_of(child) is None:
                seen.add(child)
                pending.append((f"{prefix}{name}.", child))


def check_all_flattened(module: nn.Module, ignored: set[nn.Parameter]) -> None:
    """Raise RuntimeError if a parameter of `module` was not flattened."""
    for name, param in named_parameters_with_duplicates(module):
        if param not in ignored and not is_flattened(param):
            raise RuntimeError(
                f"Found an unflattened parameter: {name}; {param.size()} {param.__class__}"
            )


def _check_uniform(states: list[Any]) -> None:
    if all(isinstance(state, nn.Parameter) for state in states) or all(
        isinstance(state, nn.Module) for state in states
    ):
        return
    types = sorted({type(state) for state in states}, key=repr)
    raise ValueError(
        "ignored_states expects all nn.Parameter or all nn.Module list elements but got types "
        f"{types}"
    )


def _as_module_list(ignored_modules: Iterable[nn.Module]) -> list[nn.Module]:
    try:
        modules = list(ignored_modules)
    except TypeError as error:
        raise TypeError(
            "`ignored_modules` should be an iterable of `torch.nn.Module`s but got "
            f"{type(ignored_modules)}"
        ) from error
    if not all(isinstance(module, nn.Module) for module in modules):
        types = sorted({type(module) for module in modules}, key=repr)
        raise ValueError(f"ignored_modules expects nn.Module list elements but got types {types}")
    return modules


def _with_submodules(
    root: nn.Module, ignored: list[nn.Module], nested: list[FSDPState]
) -> set[nn.Module]:
    for module in ignored:
        if state_of(module) is not None:
            raise ValueError("`ignored_modules` should not include FSDP modules")
    roots = [*ignored, *(module for module in root.modules() if is_replicated(module))]
    result = {child for module in roots for child in module.modules() if state_of(child) is None}
    if root in result:
        warnings.warn(
            "Trying to ignore the top-level module passed into the FSDP constructor itself will "
            f"result in all parameters being ignored and is not well-supported: {root}",
            stacklevel=4,
        )
    for state in nested:
        result |= state.ignored_modules
    return result


def _params(
    modules: set[nn.Module], params: list[nn.Parameter], nested: list[FSDPState]
) -> set[nn.Parameter]:
    result = {p for module in modules for p in module.parameters() if not is_flattened(p)}
    result |= {p for p in params if not is_flattened(p)}
    for state in nested:
        result |= state.ignored_params
    return result


def _buffer_names(root: nn.Module, modules: set[nn.Module], nested: list[FSDPState]) -> set[str]:
    buffers = {buffer for module in modules for buffer in module.buffers()}
    names = {clean_tensor_name(name) for name, buffer in root.named_buffers() if buffer in buffers}
    for state in nested:
        names |= state.ignored_buffer_names
    return names
