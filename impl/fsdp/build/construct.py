"""Construction of an FSDP unit's state: checks, sharding strategy, flattening, nested units."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
)

from impl.device import DeviceHandle
from impl.fsdp.build import materialize
from impl.fsdp.build.groups import Groups
from impl.fsdp.build.ignored import (
    Ignored,
    check_no_scalars,
    check_not_shared_with_nested,
    managed_params,
)
from impl.fsdp.build.materialize import ParamInitFn
from impl.fsdp.common import ENV_FULL_PRECISION_IN_EVAL, HYBRID_STRATEGIES
from impl.fsdp.flat_param.config import HandleConfig
from impl.fsdp.flat_param.handle import FlatParamHandle
from impl.fsdp.flat_param.packing import ParamTransform
from impl.fsdp.step.buffers import original_dtypes
from impl.fsdp.step.state import FSDPState, is_wrapped, mark_wrapped


@dataclass(frozen=True)
class UnitSettings:
    """The constructor's arguments that concern one instance, as the user gave them."""

    sharding_strategy: ShardingStrategy | None
    cpu_offload: CPUOffload | None
    backward_prefetch: BackwardPrefetch | None
    mixed_precision: MixedPrecision | None
    param_init_fn: ParamInitFn | None
    device_id: int | torch.device | None
    sync_module_states: bool
    forward_prefetch: bool
    limit_all_gathers: bool
    use_orig_params: bool
    device_mesh: DeviceMesh | None


def check_wrappable(module: nn.Module) -> None:
    """Raise ValueError if `module` itself is wrapped already; its submodules may be."""
    if is_wrapped(module):
        raise ValueError(
            f"{type(module).__name__} is already wrapped by FullyShardedDataParallel: its "
            "parameters belong to that instance. Wrap the instance, or another module."
        )


def build_state(
    wrapper: nn.Module,
    module: nn.Module,
    groups: Groups,
    ignored: Ignored,
    device_handle: DeviceHandle,
    settings: UnitSettings,
    transform: ParamTransform,
) -> FSDPState:
    """Materialise, move, synchronize, flatten and shard the parameters of `module`."""
    rank = groups.shard.rank()
    strategy = resolve_strategy(settings.sharding_strategy, groups.shard.size())
    mixed_precision = settings.mixed_precision or MixedPrecision()
    buffer_dtypes = original_dtypes(module)

    materialize.check_single_device(module, ignored, settings.device_id)
    explicit = materialize.explicit_device(settings.device_id, rank, device_handle)
    materialize.materialize(
        module, ignored, settings.param_init_fn, explicit or device_handle.current_device()
    )
    if explicit is not None:
        materialize.move_to_device(module, ignored, explicit)
    device = materialize.find_compute_device(module, ignored, explicit, rank, device_handle)
    if explicit is None:
        materialize.warn_if_on_cpu(module, ignored, device)
    params = list(managed_params(module, ignored.params))
    check_no_scalars(module, params)
    check_not_shared_with_nested(module, ignored.params)
    if settings.sync_module_states:
        between_nodes = [groups.replicate] if groups.replicate is not None else []
        materialize.sync_module_states(module, params, [*between_nodes, groups.shard], device)
    state = FSDPState(
        wrapper=wrapper,
        module=module,
        process_group=groups.shard,
        inter_node_group=groups.replicate,
        device_mesh=settings.device_mesh,
        divide_factors=groups.factors,
        sharding_strategy=strategy,
        mixed_precision=mixed_precision,
        cpu_offload=settings.cpu_offload or CPUOffload(),
        backward_prefetch=settings.backward_prefetch,
        forward_prefetch=settings.forward_prefetch,
        limit_all_gathers=settings.limit_all_gathers,
        use_orig_params=settings.use_orig_params,
        uses_full_precision_in_eval=os.environ.get(ENV_FULL_PRECISION_IN_EVAL, "") == "1",
        device_handle=device_handle,
        compute_device=device,
        ignored_modules=ignored.modules,
        ignored_params=ignored.params,
        ignored_buffer_names=ignored.buffer_names,
        synced_module_states=settings.sync_module_states,
        buffer_dtypes=buffer_dtypes,
    )
    if params:
        state.handle = _make_handle(state, params, transform)
        state.progress = state.handle.progress
    mark_wrapped(module)
    return state


def _make_handle(
    state: FSDPState, params: Iterable[nn.Parameter], transform: ParamTransform
) -> FlatParamHandle:
    config = HandleConfig(
        strategy=state.sharding_strategy,
        device=state.compute_device,
        offload_params=state.cpu_offload.offload_params,
        mixed_precision=state.mixed_precision,
        use_orig_params=state.use_orig_params,
    )
    handle = FlatParamHandle(
        list(params), state.module, state.process_group, state.device_handle, config, transform
    )
    if config.offload_params and handle.flat_param.device.type != "cpu":
        handle.set_data(handle.flat_param.data.to("cpu"))
        handle.follow_flat_param()
    return handle


def resolve_strategy(strategy: ShardingStrategy | None, world_size: int) -> ShardingStrategy:
    """The strategy to use: with one rank there is nothing to shard.

    Raises:
        KeyError: for anything but a `ShardingStrategy`, such as the name of one.
    """
    wanted = strategy or ShardingStrategy.FULL_SHARD
    if world_size == 1:
        if wanted != ShardingStrategy.NO_SHARD:
            warnings.warn(
                f"FSDP is switching to use `NO_SHARD` instead of {wanted} since the world size "
                "is 1.",
                stacklevel=4,
            )
        return ShardingStrategy.NO_SHARD
    if not isinstance(wanted, ShardingStrategy):
        raise KeyError(wanted)
    if wanted == ShardingStrategy.NO_SHARD:
        warnings.warn(
            "The `NO_SHARD` sharding strategy is deprecated. If having issues, please use "
            "`DistributedDataParallel` instead.",
            FutureWarning,
            stacklevel=4,
        )
    return wanted


def arguments_for_nested(
    settings: UnitSettings,
    process_group: object,
    groups: Groups,
    ignored: Ignored,
) -> dict[str, object]:
    """The constructor's arguments for submodules that a policy wraps."""
    if settings.sharding_strategy in HYBRID_STRATEGIES and settings.device_mesh is None:
        # The same groups for all; otherwise every instance would create its own.
        process_group = (groups.shard, groups.replicate)
    return {**vars(settings), "process_group": process_group, "ignored_states": ignored.params}
