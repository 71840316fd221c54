"""Parameter names and keys in optimizer state, matched between model, optimizer and ranks.

An optimizer numbers its parameters; with FSDP they are flat parameters, or shards of original ones.
State dicts that outlive a job use the names of the original parameters.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from impl.fsdp.common import clean_tensor_name, named_parameters_with_duplicates
from impl.fsdp.flat_param.handle import FlatParamHandle
from impl.fsdp.step.lazy_init import lazy_init
from impl.fsdp.step.state import FSDPState, state_of

# An optimizer's own key for a parameter: a number, or a name (named optimizers).
ParamKey = int | str
OptimInput = list[dict[str, Any]] | Iterable[nn.Parameter] | None


class OptimStateKey(NamedTuple):
    """A parameter in optimizer state on any rank: the original parameters in it, and whether FSDP
    manages it."""

    names: tuple[str, ...]
    is_managed: bool


@dataclass(frozen=True)
class Unit:
    """A flat parameter in optimizer state; `index_of` gives its original parameters by name."""

    state: FSDPState
    handle: FlatParamHandle
    index_of: dict[str, int]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.index_of)


@dataclass(frozen=True)
class ModelNames:
    """The parameters of a model by name.

    Attributes:
        names_of: for each parameter that `parameters()` yields, the original parameters in it: one,
            or with `use_orig_params=False` all of a unit's.
        unit_of: for each original parameter that FSDP manages, its unit.
        raw_names: for each parameter, its name as `named_parameters()` gives it.
        flat_names: clean names of the flat parameters themselves.
    """

    names_of: dict[nn.Parameter, tuple[str, ...]]
    unit_of: dict[str, Unit]
    raw_names: dict[nn.Parameter, str]
    flat_names: set[str]


def describe_model(model: nn.Module) -> ModelNames:
    """Note the names of all parameters of `model`; initialises FSDP instances lazily."""
    unit_of: dict[str, Unit] = {}
    flat_params: dict[nn.Parameter, Unit] = {}
    for prefix, module in model.named_modules():
        state = state_of(module)
        if state is None:
            continue
        lazy_init(state)
        if state.handle is None:
            continue
        dotted = f"{prefix}." if prefix else ""
        index_of = {
            clean_tensor_name(dotted + fqn): index
            for index, fqn in enumerate(state.handle.metadata.fqns)
        }
        unit = Unit(state, state.handle, index_of)
        flat_params[state.handle.flat_param] = unit
        unit_of.update(dict.fromkeys(index_of, unit))
    names_of: dict[nn.Parameter, tuple[str, ...]] = {}
    raw_names: dict[nn.Parameter, str] = {}
    flat_names: set[str] = set()
    for raw, param in named_parameters_with_duplicates(model):
        if param in names_of:
            continue
        raw_names[param] = raw
        if param in flat_params:
            names_of[param] = flat_params[param].names
            flat_names.add(clean_tensor_name(raw))
        else:
            names_of[param] = (clean_tensor_name(raw),)
    return ModelNames(names_of, unit_of, raw_names, flat_names)


def is_named(optim_state_dict: dict[str, Any]) -> bool:
    """Whether the state dict is a named optimizer's, with names instead of numbers as keys."""
    state: dict[Any, Any] = optim_state_dict.get("state") or {}
    return any(isinstance(key, str) for key in list(state)[:1])


def params_of_optimizer(
    optim: torch.optim.Optimizer, names: ModelNames, *, named: bool
) -> dict[ParamKey, nn.Parameter]:
    """The optimizer's parameters by its own keys."""
    params = [param for group in optim.param_groups for param in group["params"]]
    if not named:
        return dict(enumerate(params))
    return {names.raw_names[param]: param for param in params}


def params_of_input(model: nn.Module, optim_input: OptimInput) -> dict[ParamKey, nn.Parameter]:
    """The parameters that an optimizer built from `optim_input` numbers (None: the model's).

    Raises:
        TypeError: if `optim_input` is neither parameters nor parameter groups.
        ValueError: if it is empty.
    """
    if optim_input is None:
        return dict(enumerate(model.parameters()))
    try:
        entries: list[Any] = list(optim_input)
    except TypeError as error:
        raise TypeError(
            f"Optimizer input should be an iterable of Tensors or dicts, but got {optim_input}"
        ) from error
    if not entries:
        raise ValueError("Optimizer input should not be empty")
    if all(isinstance(entry, torch.Tensor) for entry in entries):
        return dict(enumerate(entries))
    if not all(isinstance(entry, dict) for entry in entries):
        raise TypeError("Optimizer input should be an iterable of Tensors or dicts")
    if not all("params" in entry for entry in entries):
        raise AssertionError(
            'A parameter group should map "params" to a list of the parameters in the group'
        )
    return dict(enumerate(param for entry in entries for param in entry["params"]))


def group_root(group: dist.ProcessGroup | None) -> int:
    """The global rank of the first rank of `group`."""
    return 0 if group is None else dist.get_global_rank(group, 0)


def agree_on_keys(
    params: dict[ParamKey, nn.Parameter],
    state: dict[ParamKey, Any],
    names: ModelNames,
    group: dist.ProcessGroup | None,
    *,
    merge: bool,
) -> tuple[list[OptimStateKey], dict[OptimStateKey, ParamKey]]:
    """The keys to go through, in one order on all ranks, and this rank's own key for each.

    With `merge` the keys of all ranks (with original parameters, a rank has state only for what is
    in its shard), else those of rank 0, which every rank must have.

    Raises:
        RuntimeError: if a rank lacks state that rank 0 has.
    """
    local: dict[OptimStateKey, ParamKey] = {}
    for key, param in params.items():
        if key in state:
            param_names = names.names_of[param]
            local[OptimStateKey(param_names, param_names[0] in names.unit_of)] = key
    everybodys: list[list[OptimStateKey]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everybodys, list(local), group=group)
    if merge:
        return sorted({key for keys in everybodys for key in keys}), local
    wanted = everybodys[0]
    missing = {
        rank: [key.names for key in wanted if key not in set(keys)]
        for rank, keys in enumerate(everybodys)
    }
    if any(missing.values()):
        raise RuntimeError(
            "FSDP currently requires each rank to have at least the optimizer states needed by "
            "rank 0's optimizer but some ranks are missing some of those states"
            + "".join(
                f"\nRank {rank} is missing states for the parameters: {lacks}"
                for rank, lacks in missing.items()
                if lacks
            )
        )
    return wanted, local
