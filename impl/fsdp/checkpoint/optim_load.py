"""Loading of optimizer state dicts: broadcast, flattened and sharded for this rank's optimizer."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from impl.fsdp.checkpoint.optim_names import (
    ModelNames,
    OptimInput,
    OptimStateKey,
    ParamKey,
    Unit,
    describe_model,
    group_root,
    params_of_input,
    params_of_optimizer,
)
from impl.fsdp.checkpoint.sharded_values import unshard_nested
from impl.fsdp.step.state import FSDPState, states_in

ParamState = dict[str, Any]


@dataclass(frozen=True)
class _TensorInfo:
    """Facts about a tensor that ranks other than 0 need before it is broadcast."""

    shape: torch.Size
    dtype: torch.dtype


def load_optim_state(
    optim_state_dict: dict[str, Any],
    model: nn.Module,
    optim: torch.optim.Optimizer | None,
    optim_input: OptimInput,
    group: dist.ProcessGroup | None,
    *,
    rank0_only: bool,
    is_named_optimizer: bool,
    use_orig_params: bool,
) -> dict[str, Any]:
    """A state dict that this rank's optimizer can load.

    A collective if values are sharded, or with `rank0_only`, when only rank 0 has the state dict.

    Raises:
        ValueError: if the state dict has no state, has numbers as keys, or has state that does not
            fit the parameters.
        KeyError: if a parameter group names a parameter that the optimizer does not have.
    """
    names = describe_model(model)
    state = states_in(model)[0]  # an instance that manages no parameters will do
    if rank0_only:
        optim_state_dict = _broadcast_outline(optim_state_dict, group)
    if "state" not in optim_state_dict:
        raise ValueError(
            '`optim_state_dict` must have the keys "state"to be a valid optimizer state dict'
        )
    states: dict[str, Any] = dict(optim_state_dict["state"])
    _refuse_numbers(states)
    named_state: dict[Any, Any] = {}
    for param, param_names in names.names_of.items():
        if not any(name in states for name in param_names):
            continue
        own = {name: states.pop(name) for name in param_names if name in states}
        if rank0_only:
            own = {name: _broadcast_tensors(value, state, group) for name, value in own.items()}
        key = OptimStateKey(param_names, param_names[0] in names.unit_of)
        value = _value_for_rank(names, key, own, use_orig_params)
        if value is None and is_named_optimizer and optim is not None:
            # Such optimizers want an entry also for a parameter that is not in this shard.
            value = copy.deepcopy(optim.state.get(param))
            if value is None:
                warnings.warn(f"optim_state[{key}] is not on rank{state.rank}.", stacklevel=5)
        if value is not None:
            named_state[key] = value
    for name, value in states.items():  # what belongs to no parameter
        if rank0_only and isinstance(value, (_TensorInfo, Tensor)):
            value = _broadcast_tensor(value, state, group)
        named_state[name] = copy.copy(value)
    params = (
        params_of_input(model, optim_input)
        if optim is None
        else params_of_optimizer(optim, names, named=is_named_optimizer)
    )
    return _rekey(named_state, optim_state_dict.get("param_groups"), params, names)


def _refuse_numbers(states: dict[Any, Any]) -> None:
    """Refuse numbers as keys: they would be taken for the optimizer's keys of flat parameters."""
    numbers = [key for key in states if isinstance(key, int)]
    if numbers:
        raise ValueError(
            "`optim_state_dict` should have names of parameters as keys but has the numbers "
            f"{numbers}. FullyShardedDataParallel.rekey_optim_state_dict turns numbers into names."
        )


def _value_for_rank(
    names: ModelNames, key: OptimStateKey, own: dict[str, Any], use_orig_params: bool
) -> ParamState | None:
    if not key.is_managed:
        unmanaged: ParamState = copy.copy(own[key.names[0]])
        return unmanaged
    unit = names.unit_of[key.names[0]]
    if use_orig_params:
        return _shard_orig_state(unit, key.names[0], own[key.names[0]])
    return _flatten_states(unit, own)


def _rekey(
    named_state: dict[Any, Any],
    param_groups: list[dict[str, Any]] | None,
    params: dict[ParamKey, nn.Parameter],
    names: ModelNames,
) -> dict[str, Any]:
    """Replace names by this rank's optimizer's own keys."""
    key_of = {names.names_of[param]: key for key, param in params.items()}
    key_of_name = {name: key for param_names, key in key_of.items() for name in param_names}
    state = {
        key_of.get(key.names, key.names) if isinstance(key, OptimStateKey) else key: value
        for key, value in named_state.items()
    }
    if param_groups is None:
        return {"state": state}
    groups = []
    for group in param_groups:
        settings = copy.deepcopy({k: v for k, v in group.items() if k != "params"})
        keys: set[Any] = {key_of_name[name] for name in group["params"]}
        groups.append({**settings, "params": sorted(keys)})
    return {"state": state, "param_groups": groups}


# One flat parameter


def _flatten_states(unit: Unit, states: dict[str, ParamState]) -> ParamState | None:
    """The state of a flat parameter from that of its original parameters."""
    gathered = [
        unshard_nested(states[name], unit.state) if name in states else None for name in unit.names
    ]
    state_names = [set(state) for state in gathered if state is not None]
    if not state_names or not any(state_names):
        return None
    if any(found != state_names[0] for found in state_names):
        raise ValueError(
            f"Differing optimizer state names for the unflattened parameters: {list(unit.names)}"
        )
    return {
        name: _flatten_values(
            unit, name, [None if state is None else state[name] for state in gathered]
        )
        for name in sorted(state_names[0])
    }


def _flatten_values(unit: Unit, state_name: str, values: list[Any]) -> Any:
    present = [value for value in values if value is not None]
    if not present:
        return None
    if all(torch.is_tensor(value) and value.dim() > 0 for value in present):
        return _flatten_tensors(unit, state_name, values)
    kinds = {(type(value), torch.is_tensor(value) and value.dim() == 0) for value in present}
    if len(kinds) > 1 or any(torch.is_tensor(v) and v.dim() > 0 for v in present):
        raise ValueError(
            f"Differing optimizer state types for state {state_name}, values {present}, and "
            f"unflattened parameter names {list(unit.names)}"
        )
    # One value for all: to invent one for a parameter without (a step count, say) would change
    # the optimizer's arithmetic.
    distinct = {_comparable(value) for value in values}
    if len(distinct) > 1:
        raise ValueError(
            "All unflattened parameters comprising a single flat parameter must have scalar state "
            f"with the same value and dtype but got values {distinct} for state {state_name} and "
            f"unflattened parameter names {list(unit.names)}"
        )
    first = present[0]
    return first.detach().cpu().clone() if torch.is_tensor(first) else first


def _comparable(value: Any) -> Any:
    return (value.item(), value.dtype) if torch.is_tensor(value) else value


def _flatten_tensors(unit: Unit, state_name: str, values: list[Tensor | None]) -> Tensor:
    """This rank's shard of the flattened `values`, with zeros for parameters that have none."""
    handle = unit.handle
    present = [value for value in values if value is not None]
    dtypes = {value.dtype for value in present}
    if len(dtypes) > 1:
        raise ValueError(
            "All unflattened parameters comprising a single flat parameter must have "
            f"positive-dimension tensor state with the same dtype but got dtypes {dtypes} for "
            f"state {state_name} and unflattened parameter names {list(unit.names)}"
        )
    filled = []
    for value, param in zip(values, handle.metadata.params, strict=True):
        if value is not None and value.shape != param.shape:
            raise ValueError(
                "Tensor optimizer state does not have same shape as its parameter: "
                f"{value.shape} {param.shape}"
            )
        filled.append(
            torch.zeros(param.shape, dtype=present[0].dtype, device="cpu")
            if value is None
            else value.cpu()
        )
    flat = handle.metadata.flatten(filled)
    if not handle.config.uses_sharding:
        return flat
    shard = flat.new_zeros(handle.shard_layout.numel)
    handle.local_chunk(shard).copy_(handle.own_part(flat))
    return shard


# Original parameters


def _shard_orig_state(unit: Unit, name: str, state: ParamState) -> ParamState | None:
    """This rank's part of an original parameter's state, None if it holds none of it."""
    handle, index = unit.handle, unit.index_of[name]
    if not state:
        return None
    gathered = unshard_nested(state, unit.state)
    part = handle.shard_layout.params[index]
    if part is None:
        return None
    result: ParamState = {}
    for key, value in gathered.items():
        if torch.is_tensor(value) and value.dim() > 0 and handle.config.uses_sharding:
            if value.shape != handle.metadata.params[index].shape:
                raise ValueError(
                    "Tensor optimizer state does not have same shape as its parameter: "
                    f"{value.shape} {handle.metadata.params[index].shape}"
                )
            flat = handle.metadata.flatten_one(index, value)
            value = flat[part.start : part.end].clone()
        result[key] = value
    return result


# From rank 0


def _broadcast_outline(
    optim_state_dict: dict[str, Any], group: dist.ProcessGroup | None
) -> dict[str, Any]:
    """The state dict of rank 0; elsewhere with a description in place of each tensor."""
    is_source = dist.get_rank(group) == 0
    outline: list[Any] = [None]
    if is_source:
        outline[0] = tree_map_only(
            Tensor,
            lambda t: t.cpu() if t.dim() == 0 else _TensorInfo(t.shape, t.dtype),
            optim_state_dict,
        )
    dist.broadcast_object_list(outline, src=group_root(group), group=group)
    return optim_state_dict if is_source else outline[0]


def _broadcast_tensors(
    param_state: ParamState, state: FSDPState, group: dist.ProcessGroup | None
) -> ParamState:
    return {
        name: _broadcast_tensor(value, state, group) for name, value in sorted(param_state.items())
    }


def _broadcast_tensor(value: Any, state: FSDPState, group: dist.ProcessGroup | None) -> Any:
    """The value of rank 0; `value` is that, or the description of a tensor."""
    if isinstance(value, _TensorInfo):
        tensor = torch.empty(value.shape, dtype=value.dtype, device=state.compute_device)
    elif isinstance(value, Tensor) and value.dim() > 0:
        tensor = value.to(state.compute_device).contiguous()
    else:
        return value
    dist.broadcast(tensor, src=group_root(group), group=group)
    return tensor
