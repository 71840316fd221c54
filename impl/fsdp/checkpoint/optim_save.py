"""Saving of optimizer state dicts: gathered, unflattened by original parameter, full or sharded.

State with dimensions has the shape of the shard that it belongs to. It is gathered like the
parameter, once for each kind of state (Adam: twice), and cut into the original parameters. Scalars
and other objects are the same for a whole flat parameter and are copied.
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from impl.fsdp.checkpoint.optim_names import (
    ModelNames,
    OptimInput,
    OptimStateKey,
    ParamKey,
    Unit,
    agree_on_keys,
    describe_model,
    is_named,
    params_of_input,
    params_of_optimizer,
)
from impl.fsdp.checkpoint.sharded_values import shard_rows
from impl.fsdp.checkpoint.state_dict_type import uses_dtensor
from impl.fsdp.flat_param import gradients
from impl.fsdp.step.state import states_in
from impl.torch_private import all_gather_single

ParamState = dict[str, Any]


@dataclass(frozen=True)
class SaveOptions:
    """How optimizer state is to be saved.

    Attributes:
        rank0_only: only rank 0 of the group gets a result.
        shard: values with dimensions are sharded by rows.
        offload_to_cpu: tensors are moved to CPU.
    """

    rank0_only: bool
    shard: bool
    offload_to_cpu: bool


@torch.no_grad()
def save_optim_state(
    model: nn.Module,
    optim: torch.optim.Optimizer | None,
    optim_state_dict: dict[str, Any],
    optim_input: OptimInput,
    group: dist.ProcessGroup | None,
    options: SaveOptions,
    *,
    use_orig_params: bool,
) -> dict[str, Any]:
    """The optimizer's state dict with the names of original parameters as keys. A collective.

    `optim` None means that the optimizer was built from `optim_input`. Ranks that save nothing get
    an empty dict.
    """
    gradients.reset_if_cleared(s.handle for s in states_in(model) if s.handle is not None)
    names = describe_model(model)
    params = (
        params_of_input(model, optim_input)
        if optim is None
        else params_of_optimizer(optim, names, named=is_named(optim_state_dict))
    )
    states: dict[ParamKey, ParamState] = optim_state_dict["state"]
    keys, own_keys = agree_on_keys(params, states, names, group, merge=use_orig_params)
    saves = options.shard or not options.rank0_only or dist.get_rank(group) == 0
    managed = _managed_states(keys, own_keys, states, names)
    result: dict[Any, Any] = {}
    for unit, unit_states in managed:
        gathered = (
            _gather_orig_states(unit, unit_states, options)
            if use_orig_params
            else _gather_flat_state(unit, unit_states, options)
        )
        if saves:
            result.update(gathered)
    if not saves:
        return {}
    for key in keys:
        if not key.is_managed and key in own_keys:
            state = copy.copy(states[own_keys[key]])
            result[key.names[0]] = _offloaded(state) if options.offload_to_cpu else state
    _add_user_state(result, states, params, names)
    saved: dict[str, Any] = {"state": result}
    if "param_groups" in optim_state_dict:
        saved["param_groups"] = [
            {
                **copy.deepcopy({k: v for k, v in group_.items() if k != "params"}),
                "params": [
                    name for key in group_["params"] for name in names.names_of[params[key]]
                ],
            }
            for group_ in optim_state_dict["param_groups"]
        ]
    return saved


def _managed_states(
    keys: list[OptimStateKey],
    own_keys: dict[OptimStateKey, ParamKey],
    states: dict[ParamKey, ParamState],
    names: ModelNames,
) -> list[tuple[Unit, dict[str, ParamState]]]:
    """This rank's state of each unit, by the name of the original parameter.

    A flat parameter's state stands under the unit's first name. The order is the same on all ranks.
    """
    by_unit: dict[int, tuple[Unit, dict[str, ParamState]]] = {}
    for key in keys:
        unit = names.unit_of.get(key.names[0]) if key.is_managed else None
        if unit is None:
            continue
        own_key = own_keys.get(key)
        _, unit_states = by_unit.setdefault(id(unit), (unit, {}))
        unit_states[key.names[0]] = {} if own_key is None else states[own_key]
    return list(by_unit.values())


def _add_user_state(
    result: dict[Any, Any],
    states: dict[ParamKey, ParamState],
    params: dict[ParamKey, nn.Parameter],
    names: ModelNames,
) -> None:
    """Copy what belongs to no parameter that FSDP knows."""
    for key, value in states.items():
        if key in result or key in names.flat_names or key in params:
            continue
        warnings.warn(
            f"Found a optim state, {key}, that FSDP cannot process. FSDP will directly copy "
            "everything to the returned state_dict. In most cases, this is a user-defined state "
            "that is not associated with any particular parameter. Another possible case is this "
            "state is managed by TorchRec. Otherwise, there may be a mismatched assumption of "
            "optim_state_dict of this mode.",
            stacklevel=5,
        )
        result[key] = value


# One flat parameter, `use_orig_params=False`


def _gather_flat_state(
    unit: Unit, unit_states: dict[str, ParamState], options: SaveOptions
) -> dict[str, ParamState]:
    (state,) = unit_states.values()
    tensors: dict[str, list[Tensor]] = {}
    others: ParamState = {}
    for name, value in sorted(state.items()):
        if torch.is_tensor(value) and value.dim() > 0:
            tensors[name] = unit.handle.metadata.unflatten(_gather(unit, value))
        else:
            others[name] = value
    return {
        param: {
            **{name: _finished(unit, views[index], options) for name, views in tensors.items()},
            **_copied(_offloaded(others) if options.offload_to_cpu else others),
        }
        for param, index in unit.index_of.items()
    }


def _copied(state: ParamState) -> ParamState:
    """Copies of the tensors for each parameter: an optimizer counts its steps in place.

    (torch 2.13 gives all parameters of a unit one `step`, so that a loaded one counts too far.)
    """
    return {k: v.detach().clone() if torch.is_tensor(v) else v for k, v in state.items()}


def _gather(unit: Unit, shard: Tensor) -> Tensor:
    """All of a flat tensor, (layout.numel,), of which `shard` is this rank's part."""
    handle = unit.handle
    if not handle.config.uses_sharding:
        return shard
    if shard.numel() != handle.shard_layout.numel:
        raise ValueError(
            f"Optimizer state of {list(unit.names)} must have one dimension and "
            f"{handle.shard_layout.numel} elements, as the sharded flat parameter has, but has "
            f"shape {tuple(shard.shape)}"
        )
    source = shard.to(handle.device).contiguous()
    full = source.new_empty(source.numel() * handle.world_size)
    all_gather_single(full, source, handle.process_group, False)
    return full[: handle.layout.numel]


# Original parameters, `use_orig_params=True`


@dataclass
class _StateInfo:
    """A rank's part of one parameter's state: dtypes of tensors, other entries by value."""

    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    others: ParamState = field(default_factory=dict)
    has_elements: bool = False  # whether a tensor among them has any


def _gather_orig_states(
    unit: Unit, unit_states: dict[str, ParamState], options: SaveOptions
) -> dict[str, ParamState]:
    handle = unit.handle
    if not handle.config.uses_sharding:
        return unit_states
    mine = {param: _describe(state) for param, state in unit_states.items()}
    everybodys: list[dict[str, _StateInfo]] = [{} for _ in range(handle.world_size)]
    dist.all_gather_object(everybodys, mine, group=handle.process_group)
    dtypes: dict[str, torch.dtype] = {}
    holders: dict[str, list[str]] = {}
    result: dict[str, ParamState] = {param: {} for param in unit_states}
    for param in unit_states:
        infos = [infos[param] for infos in everybodys if param in infos]
        for name in sorted({name for info in infos for name in info.dtypes}):
            holders.setdefault(name, []).append(param)
            found = {info.dtypes[name] for info in infos if name in info.dtypes}
            found.add(dtypes.get(name, next(iter(found))))
            if len(found) > 1:
                raise AssertionError(f"Ranks disagree on the dtype of {name} of {param}: {found}")
            dtypes[name] = found.pop()
        result[param].update(_agreed_others(param, infos))
    for name, params in sorted(holders.items()):
        local = torch.zeros(handle.shard_layout.numel, dtype=dtypes[name], device=handle.device)
        for param in params:
            part = handle.shard_layout.params[unit.index_of[param]]
            value = unit_states[param].get(name)
            if part is not None and value is not None:
                start = part.offset_in_shard
                local[start : start + part.numel].copy_(value.reshape(-1))
        views = handle.metadata.unflatten(_gather(unit, local))
        for param in params:
            result[param][name] = _finished(unit, views[unit.index_of[param]], options)
    return result


def _describe(state: ParamState) -> _StateInfo:
    info = _StateInfo()
    for name, value in state.items():
        if torch.is_tensor(value) and value.dim() > 0:
            info.dtypes[name] = value.dtype
            info.has_elements |= value.numel() > 0
        else:
            info.others[name] = value.cpu() if torch.is_tensor(value) else value
    return info


def _agreed_others(param: str, infos: list[_StateInfo]) -> ParamState:
    """Scalars and other objects, which all ranks that hold part of the parameter must agree on.

    Adagrad has state for a parameter that is not in this rank's shard too, and never steps it.
    """
    agreed: ParamState = {}
    for info in [info for info in infos if info.has_elements or not info.dtypes] or infos:
        for name, value in info.others.items():
            if name in agreed and not _equal(agreed[name], value):
                raise AssertionError(
                    f"Ranks have different values for {name} of {param}: {agreed[name]} and {value}"
                )
            agreed[name] = value
    return agreed


def _equal(a: Any, b: Any) -> bool:
    if torch.is_tensor(a) and torch.is_tensor(b):
        return bool(torch.equal(a, b))
    return bool(a == b)


# Both


def _finished(unit: Unit, value: Tensor, options: SaveOptions) -> Any:
    """One parameter's value as the caller wants it."""
    result: Any = value
    if options.shard:
        config = unit.state.optim_state_dict_config
        as_dtensor = uses_dtensor(unit.state) or bool(getattr(config, "_use_dtensor", False))
        result = shard_rows(value, unit.state, as_dtensor=as_dtensor)
    return result.cpu() if options.offload_to_cpu else result


def _offloaded(state: ParamState) -> ParamState:
    return {key: v.cpu() if torch.is_tensor(v) else v for key, v in state.items()}
