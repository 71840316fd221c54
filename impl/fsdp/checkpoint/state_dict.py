"""Saving and loading of model state dicts (full, sharded, local) by `nn.Module`'s own hooks.

`module.state_dict()` of a tree runs, for each instance: a hook before it collects the instance's
entries, which unshards, and a hook afterwards, which turns what was collected into the wanted form
and reshards. Loading is the mirror image. Names never show the wrapper.

| kind    | value of a parameter                                            | on rank |
|---------|-----------------------------------------------------------------|---------|
| FULL    | the whole tensor                                                | each, or 0 |
| SHARDED | `ShardedTensor` or `DTensor` of the whole shape, split by rows  | each    |
| LOCAL   | none; the flat parameter's shard as a one-dimensional `ShardedTensor` | each |

With `NO_SHARD` there is nothing to shard: state dicts are full.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullStateDictConfig, ShardingStrategy, StateDictType

from impl.fsdp.checkpoint.sharded_values import shard_rows, unshard_rows
from impl.fsdp.checkpoint.state_dict_type import require_no_device_mesh, uses_dtensor
from impl.fsdp.common import FLAT_PARAM, FSDP_PREFIX, clean_tensor_name
from impl.fsdp.flat_param import gradients
from impl.fsdp.flat_param.handle import FlatParamHandle
from impl.fsdp.flat_param.packing import OrigParam
from impl.fsdp.flat_param.writeback import adopt_replaced_params
from impl.fsdp.step.backward import ensure_ready
from impl.fsdp.step.sharding import settle
from impl.fsdp.step.state import FSDPState, state_of
from impl.fsdp.step.unshard_params import (
    SummonOptions,
    flat_param_exposed,
    follow_flat_param,
    unsharded,
)
from impl.torch_private import ShardedTensor, sharded_tensor_from_flat_shard

StateDict = dict[str, Any]


def register_hooks(wrapper: nn.Module) -> None:
    """Make `state_dict` and `load_state_dict` of an FSDP module gather and shard."""
    wrapper.register_state_dict_pre_hook(_before_save)
    wrapper.register_state_dict_post_hook(_after_save)
    wrapper.register_load_state_dict_pre_hook(_before_load)
    wrapper.register_load_state_dict_post_hook(_after_load)


# Hooks


@torch.no_grad()
def _before_save(wrapper: nn.Module, prefix: str, keep_vars: bool) -> None:
    state = _state(wrapper)
    kind = _kind(state)
    ensure_ready(state)
    settle(state)
    if state.is_root:
        gradients.reset_if_cleared(state.shared.units)
    if kind == StateDictType.LOCAL_STATE_DICT:
        _enter(state, flat_param_exposed(state))
        return
    rank0_only = kind == StateDictType.FULL_STATE_DICT and _is_rank0_only(state)
    _enter(state, _shown_in_full(state, SummonOptions(writeback=False, rank0_only=rank0_only)))


@torch.no_grad()
def _after_save(
    wrapper: nn.Module, state_dict: StateDict, prefix: str, local_metadata: StateDict
) -> None:
    state = _state(wrapper)
    kind = _kind(state)
    replace_prefix(state_dict, prefix + FSDP_PREFIX, prefix)
    try:
        if state.handle is None:
            pass
        elif kind == StateDictType.LOCAL_STATE_DICT:
            _save_local(state, state.handle, state_dict, prefix)
        elif kind == StateDictType.FULL_STATE_DICT:
            _save_full(state, state.handle, state_dict, prefix)
        else:
            _save_sharded(state, state.handle, state_dict, prefix)
    finally:
        _leave(state)
    if kind != StateDictType.LOCAL_STATE_DICT:
        _save_buffers(state, state_dict, prefix)


@torch.no_grad()
def _before_load(
    wrapper: nn.Module,
    state_dict: StateDict,
    prefix: str,
    local_metadata: StateDict,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    state = _state(wrapper)
    kind = _kind(state)
    ensure_ready(state)
    settle(state)
    replace_prefix(state_dict, prefix, prefix + FSDP_PREFIX)
    try:
        if kind == StateDictType.FULL_STATE_DICT:
            _enter(state, _shown_in_full(state, SummonOptions(writeback=True)))
        elif kind == StateDictType.LOCAL_STATE_DICT:
            if state.handle is not None:
                _load_local(state.handle, state_dict, prefix + FSDP_PREFIX)
            _enter(state, _flat_param_loaded(state))
        else:
            if state.handle is not None:
                _load_sharded(state, state.handle, state_dict, prefix + FSDP_PREFIX)
            _enter(state, _shown_in_full(state, SummonOptions(writeback=True)))
    except BaseException:
        # The instances above wait for their hook after loading, which will not come.
        for other in reversed(state.shared.states):
            _leave(other)
        raise


@torch.no_grad()
def _after_load(wrapper: nn.Module, incompatible_keys: tuple[list[str], list[str]]) -> None:
    _leave(_state(wrapper))
    for keys in incompatible_keys:
        keys[:] = [clean_tensor_name(key) for key in keys]


# Which kind, and what is shown meanwhile


def _state(wrapper: nn.Module) -> FSDPState:
    state = state_of(wrapper)
    assert state is not None
    return state


def _kind(state: FSDPState) -> StateDictType:
    if state.sharding_strategy != ShardingStrategy.NO_SHARD:
        require_no_device_mesh(state)
        return state.state_dict_type
    if state.state_dict_type != StateDictType.FULL_STATE_DICT:
        warnings.warn(
            "When using ``NO_SHARD`` for ``ShardingStrategy``, full_state_dict will be returned.",
            stacklevel=4,
        )
    return StateDictType.FULL_STATE_DICT


def _is_rank0_only(state: FSDPState) -> bool:
    config = state.state_dict_config
    return isinstance(config, FullStateDictConfig) and config.rank0_only


@contextlib.contextmanager
def _shown_in_full(state: FSDPState, options: SummonOptions) -> Iterator[None]:
    """Show full parameters, unless they are shown anyway (`NO_SHARD` with original parameters)."""
    if state.use_orig_params and state.sharding_strategy == ShardingStrategy.NO_SHARD:
        yield
        if options.writeback and state.handle is not None:
            adopt_replaced_params(state.handle)
            state.handle.show_unsharded_params()
        return
    with unsharded(state, options):
        yield


@contextlib.contextmanager
def _flat_param_loaded(state: FSDPState) -> Iterator[None]:
    """Show the flat parameter, and adopt the one that `load_state_dict` may put in its place."""
    with flat_param_exposed(state):
        yield
        follow_flat_param(state)


def _enter(state: FSDPState, context: contextlib.AbstractContextManager[None]) -> None:
    """Enter `context` in a pre-hook; the post-hook leaves it.

    If an error in some module's own hook kept ours from running last time, that comes first.
    """
    _leave(state)
    context.__enter__()
    state.unsharded_for_state_dict = context


def _leave(state: FSDPState) -> None:
    context, state.unsharded_for_state_dict = state.unsharded_for_state_dict, None
    if context is not None:
        context.__exit__(None, None, None)


# Names


def replace_prefix(state_dict: StateDict, old: str, new: str) -> None:
    """Rename the keys that start with `old`, in place."""
    for key in [key for key in state_dict if key.startswith(old)]:
        state_dict[new + key[len(old) :]] = state_dict.pop(key)


def param_keys(handle: FlatParamHandle) -> list[str]:
    """The keys of the unit's parameters, seen from the wrapper, tied ones under every name."""
    places = [(p.module_name, p.name) for p in handle.metadata.params]
    places += [(s.module_name, s.name) for s in handle.metadata.shared]
    return [clean_tensor_name(f"{module}.{name}" if module else name) for module, name in places]


def _params_by_key(handle: FlatParamHandle) -> list[OrigParam]:
    """The parameter behind each of `param_keys`."""
    params = handle.metadata.params
    return [*params, *(params[shared.primary] for shared in handle.metadata.shared)]


# Saving


def _save_full(
    state: FSDPState, handle: FlatParamHandle, state_dict: StateDict, prefix: str
) -> None:
    """Copy the parameters: after this hook the memory that they view is freed."""
    if _is_rank0_only(state) and state.rank != 0:
        for key in (*param_keys(handle), FLAT_PARAM):
            state_dict.pop(prefix + key, None)
        return
    to_cpu = state.state_dict_config.offload_to_cpu
    copies: dict[str, Tensor] = {}
    for key, param in zip(param_keys(handle), _params_by_key(handle), strict=True):
        value: Tensor = _entry(state, state_dict, prefix + key)
        if param.fqn not in copies:  # tied parameters stay tied
            copies[param.fqn] = value.detach().to("cpu" if to_cpu else value.device, copy=True)
        state_dict[prefix + key] = copies[param.fqn]


def _save_sharded(
    state: FSDPState, handle: FlatParamHandle, state_dict: StateDict, prefix: str
) -> None:
    for key in param_keys(handle):
        value: Any = shard_rows(
            _entry(state, state_dict, prefix + key), state, as_dtensor=uses_dtensor(state)
        )
        state_dict[prefix + key] = value.cpu() if state.state_dict_config.offload_to_cpu else value


def _save_local(
    state: FSDPState, handle: FlatParamHandle, state_dict: StateDict, prefix: str
) -> None:
    """The shard without padding, so that it does not tie the checkpoint to the world size."""
    value: Any = sharded_tensor_from_flat_shard(
        handle.local_chunk(handle.local_shard),
        handle.shard_layout.start,
        handle.layout.numel,
        state.process_group,
    )
    state_dict[prefix + FLAT_PARAM] = (
        value.cpu() if state.state_dict_config.offload_to_cpu else value
    )


def _save_buffers(state: FSDPState, state_dict: StateDict, prefix: str) -> None:
    """Buffers in the dtype that they had before mixed precision, on CPU if configured."""
    drops = (
        _kind(state) == StateDictType.FULL_STATE_DICT
        and _is_rank0_only(state)
        and state.rank != 0
        and state.handle is not None
    )
    for name, dtype in state.buffer_dtypes.items():
        key = prefix + name
        if key not in state_dict:
            continue  # not persistent
        if drops:
            del state_dict[key]
            continue
        buffer: Tensor = state_dict[key]
        if state.state_dict_config.offload_to_cpu:
            buffer = buffer.cpu()
        if (
            state.mixed_precision.buffer_dtype is not None
            and name not in state.ignored_buffer_names
            and buffer.is_floating_point()
        ):
            buffer = buffer.to(dtype, copy=True)
        state_dict[key] = buffer


def _entry(state: FSDPState, state_dict: StateDict, key: str) -> Tensor:
    if key not in state_dict:
        raise AssertionError(
            f"FSDP assumes {key} is in the state_dict but the state_dict only has "
            f"{list(state_dict)} on rank {state.rank}."
        )
    value: Tensor = state_dict[key]
    return value


# Loading


def _load_sharded(
    state: FSDPState, handle: FlatParamHandle, state_dict: StateDict, prefix: str
) -> None:
    """Replace sharded values by whole tensors, which `load_state_dict` then copies."""
    transform = handle.metadata.transform
    for key, param in zip(param_keys(handle), _params_by_key(handle), strict=True):
        if prefix + key in state_dict:  # otherwise `load_state_dict` reports it as missing
            whole = unshard_rows(state_dict[prefix + key], state)
            state_dict[prefix + key] = transform.post_unflatten(whole, param.extension)


def _load_local(handle: FlatParamHandle, state_dict: StateDict, prefix: str) -> None:
    """Replace the flat parameter's `ShardedTensor` by this rank's shard, padded again."""
    key = prefix + FLAT_PARAM
    if key not in state_dict:
        raise AssertionError(
            "No `FlatParameter` in `state_dict` for this FSDP instance but it has parameters"
        )
    value = state_dict[key]
    if not isinstance(value, ShardedTensor):
        raise AssertionError("Tensors in local_state_dict should be ShardedTensor.")
    shard = handle.local_shard.clone()
    used = handle.local_chunk(shard)
    shards = value.local_shards()
    loaded = shards[0].tensor if shards else used.new_empty(0)
    if loaded.numel() != used.numel():
        raise AssertionError(
            f"Local shard size = {used.numel()} and the tensor in the state_dict is "
            f"{loaded.numel()}."
        )
    used.copy_(loaded)
    state_dict[key] = shard
