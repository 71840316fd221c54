"""Pre- and post-forward of a unit: cast inputs, unshard, reshard, register the backward hooks."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist

from impl import nested_tensors
from impl.fsdp.common import span
from impl.fsdp.flat_param import gradients
from impl.fsdp.flat_param.handle import FlatParamHandle
from impl.fsdp.phases import DataEvent, UnitEvent, UnitPhase
from impl.fsdp.step import backward, buffers
from impl.fsdp.step.order import first_disagreement
from impl.fsdp.step.sharding import prefetch, reshard, unshard
from impl.fsdp.step.state import FSDPState
from impl.torch_private import all_gather_single, is_backward_running

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def root_pre_forward(state: FSDPState, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """What only the root does, before anything else: settle streams, move inputs."""
    _refuse_if_summoned(state)
    backward.ensure_ready(state)
    if not state.is_root:
        return args, kwargs
    context, streams = state.shared, state.shared.streams
    buffers.set_precision_for_forward(state)
    if state.forward_prefetch:
        context.order.begin_forward(handle.unit for handle in context.units)
        for handle in context.units:
            handle.data_progress.on(DataEvent.FORGOTTEN)
    # The optimizer step ran on the compute stream; gathers read what it wrote.
    compute = state.device_handle.current_stream()
    streams.unshard.wait_stream(compute)
    streams.pre_unshard.wait_stream(compute)
    gradients.reset_if_cleared(context.units)
    args, kwargs = nested_tensors.move((args, kwargs), state.compute_device)
    precision = state.mixed_precision
    forces_full = state.handle is not None and state.handle.forces_full_precision
    in_full_precision_eval = state.uses_full_precision_in_eval and not state.module.training
    if precision.cast_root_forward_inputs and not forces_full and not in_full_precision_eval:
        args, kwargs = nested_tensors.cast_floating((args, kwargs), precision.param_dtype)
    return args, kwargs


def _refuse_if_summoned(state: FSDPState) -> None:
    """Raise inside `summon_full_params`, whose end expects full parameters and not shards.

    With original parameters and nothing to write back it does no harm. (torch 2.13 raises at the
    end of the context, or with original parameters writes wrong values back.)
    """
    handle = state.handle
    if handle is None or not handle.config.uses_sharding:
        return
    if handle.phase is UnitPhase.SUMMONED or (
        handle.phase is UnitPhase.SUMMONED_READ_ONLY and handle.orig_views is None
    ):
        raise AssertionError(
            "Cannot run a forward while full parameters are summoned"
            + ("" if handle.orig_views is None else " with writeback=True")
        )


def pre_forward(state: FSDPState, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Gather the parameters and arm the hook that reduces their gradient."""
    handle = state.handle
    if is_recomputing(state):
        # The parameters are there. The inputs are not cast if the checkpoint is around the unit.
        return _cast_inputs(state, args, kwargs)
    if handle is None:
        state.progress.on(UnitEvent.FORWARD_BEGAN)
        return args, kwargs
    with span("_pre_forward"):
        _record_and_check_order(state, handle)
        handle.progress.on(UnitEvent.FORWARD_BEGAN)
        _unshard_for_forward(state, handle)
        backward.arm_post_backward(state, handle)
        if handle.config.offload_params:
            handle.cpu_grad_buffer()
        args, kwargs = _cast_inputs(state, args, kwargs)
        backward.arm_post_backward_of_frozen(state, handle, (args, kwargs))
    handle.check_on_compute_device(handle.flat_param)
    return args, kwargs


def _cast_inputs(state: FSDPState, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """The inputs in the dtype of the unit's parameters, if it is to cast them.

    In a recomputation, too. (torch 2.13 does not, so that a checkpoint around a unit that casts
    computes its gradients from other inputs than its outputs, or raises.)
    """
    handle, precision = state.handle, state.mixed_precision
    if handle is None or handle.forces_full_precision or not precision.cast_forward_inputs:
        return args, kwargs
    return nested_tensors.cast_floating((args, kwargs), precision.param_dtype)


def post_forward(state: FSDPState, output: Any) -> Any:
    """Free the parameters if the strategy says so, and arm the hook that gathers them again."""
    handle = state.handle
    if is_recomputing(state):
        return output
    with span("_post_forward"):
        if handle is not None:
            if torch.is_grad_enabled():
                state.shared.order.record_post_forward(handle.unit)
            # The root's parameters are kept: its backward comes right after its forward.
            free = not state.is_root and handle.config.reshards_after_forward
            reshard(state, handle, free=free)
            if handle.orig_views is not None and not handle.skipped_sharded_views:
                gradients.show_grads(handle)
        backward.arm_pre_backward(state, output)
        state.progress.on(UnitEvent.FORWARD_ENDED)
        if state.is_root:
            if state.forward_prefetch:
                # What was gathered early and then not used is shown until the backward.
                state.device_handle.current_stream().wait_stream(state.shared.streams.unshard)
            if not torch.is_grad_enabled():
                _free_all(state)
    return output


def _free_all(root: FSDPState) -> None:
    """Free what a forward has kept or gathered early, if no backward will.

    Until the next forward the user may write the shards, on some ranks and not on others, in ways
    that nothing here can see (`param.data.copy_(...)`). (torch 2.13 keeps the parameters, and
    computes with the old values.)
    """
    for state, handle in zip(root.shared.owners, root.shared.units, strict=True):
        is_sharded = handle.config.uses_sharding
        if handle.points_to_unsharded or (is_sharded and handle.holds_unsharded):
            reshard(state, handle, free=is_sharded)
            if handle.orig_views is not None:
                gradients.show_grads(handle)


def abandon(state: FSDPState) -> None:
    """After an error in the forward: reshard, so that the user may save a state dict or go on.

    In a recomputation, an exception is how checkpointing stops early; nothing is to be done then.
    """
    handle = state.handle
    if is_recomputing(state) or (handle is not None and handle.phase is not UnitPhase.FORWARD):
        return
    state.progress.on(UnitEvent.FORWARD_ENDED)
    if handle is not None:
        reshard(state, handle, free=handle.config.uses_sharding)
    if state.is_root and not is_backward_running():
        _free_all(state)


def is_recomputing(state: FSDPState) -> bool:
    """Whether this forward is activation checkpointing's, inside the backward pass."""
    return state.phase is UnitPhase.BACKWARD_PRE


def _unshard_for_forward(state: FSDPState, handle: FlatParamHandle) -> None:
    streams = state.shared.streams
    if not handle.is_prefetched:
        unshard(state, handle, streams.unshard, streams.pre_unshard)
    state.device_handle.current_stream().wait_stream(streams.unshard)
    prefetch(state, handle)


def _record_and_check_order(state: FSDPState, handle: FlatParamHandle) -> None:
    """Note that `handle` runs; with TORCH_DISTRIBUTED_DEBUG=DETAIL, check that it is its turn.

    Raises:
        RuntimeError: if ranks gather different units in the first iteration.
    """
    context = state.shared
    # An eval forward has no backward that would end its iteration: it cannot be checked.
    if state.module.training and dist.get_debug_level() == dist.DebugLevel.DETAIL:
        if context.order.is_first_iteration:
            _check_same_unit_on_all_ranks(state, handle)
        deviation = context.order.check_forward(handle.unit)
        if deviation is not None:
            warnings.warn(deviation.message(state.rank, context.param_names), stacklevel=4)
    context.order.record_pre_forward(handle.unit)


def _check_same_unit_on_all_ranks(state: FSDPState, handle: FlatParamHandle) -> None:
    group = state.shared.root.process_group
    mine = torch.tensor([handle.unit], dtype=torch.int32, device=handle.device)
    units = torch.zeros(group.size(), dtype=torch.int32, device=handle.device)
    all_gather_single(units, mine, group, False)
    message = first_disagreement(units.tolist(), state.shared.param_names)
    if message is not None:
        raise RuntimeError(message)
