"""Pre- and post-backward hooks of a unit: unshard, reshard, reduce; final callback, error recovery.

    pre-backward      a hook on the forward's outputs; gathers, and prefetches the next unit
    (autograd)        computes the gradient of the flat parameter
    post-backward     a hook on the flat parameter's gradient accumulator; frees, reduces
    end of backward   autograd's final callback, queued by the first pre-backward hook; not called
                      after an error, from which the next call to the model recovers

The post-backward hook sits on the gradient accumulator of the *first* forward in an iteration. With
low precision parameters, each forward has its own accumulator; the first forward's runs last, when
the gradient is complete.

The end of a backward removes that hook. If another backward follows (of another forward's graph, or
of the same one, retained), units gather for it like for the first, without prefetching, and their
gradients are reduced at its end.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.hooks import unserializable_hook

from impl import nested_tensors
from impl.fsdp.common import TrainingState, check, span
from impl.fsdp.flat_param import gradients
from impl.fsdp.flat_param.handle import FlatParamHandle
from impl.fsdp.phases import GradientEvent, UnitEvent, UnitPhase
from impl.fsdp.step.lazy_init import lazy_init
from impl.fsdp.step.reduction import reduce_gradient
from impl.fsdp.step.sharding import frees_in_backward, prefetch, reshard, settle, unshard
from impl.fsdp.step.state import FSDPState, RootContext
from impl.torch_private import is_backward_running, queue_backward_callback

_IN_BACKWARD = (UnitPhase.BACKWARD_PRE, UnitPhase.BACKWARD_POST)

# Arming, in the forward


def arm_pre_backward(state: FSDPState, output: Any) -> None:
    """Have the first gradient that reaches `output` gather the unit's parameters."""
    if not torch.is_grad_enabled():
        return
    if state.is_root:
        state.shared.final_callback_queued = False
    hook = unserializable_hook(functools.partial(_pre_backward, state))
    differentiable = [
        tensor for tensor in nested_tensors.tensors_in(output) if tensor.requires_grad
    ]
    for tensor in differentiable:
        tensor.register_hook(hook)
    if state.handle is not None:
        state.shared.order.expect_backward(state.handle.unit, expected=bool(differentiable))


def arm_post_backward(state: FSDPState, handle: FlatParamHandle) -> None:
    """Have the flat parameter's gradient, once complete, reduced."""
    flat_param = handle.flat_param
    if (
        not torch.is_grad_enabled()
        or handle.post_backward_hook is not None
        or not flat_param.requires_grad
    ):
        return
    # Any differentiable function of the parameter leads to its accumulator.
    function = flat_param.expand_as(flat_param).grad_fn
    assert function is not None
    accumulator = function.next_functions[0][0]
    assert accumulator is not None
    hook = accumulator.register_hook(_weakly(_post_backward, state, handle))
    handle.post_backward_hook = (accumulator, hook)


def arm_post_backward_of_frozen(state: FSDPState, handle: FlatParamHandle, inputs: Any) -> None:
    """Have a frozen unit freed when the gradients of its inputs are computed."""
    if (
        not torch.is_grad_enabled()
        or handle.post_backward_hook is not None
        or handle.flat_param.requires_grad
    ):
        return
    tensors = [tensor for tensor in nested_tensors.tensors_in(inputs) if tensor.requires_grad]
    hook = register_multi_grad_hook(tensors, _weakly(_post_backward_of_frozen, state, handle))
    handle.post_backward_hook = (hook,)


def _weakly(
    hook: Callable[..., None], state: FSDPState, handle: FlatParamHandle
) -> Callable[..., None]:
    """The hook, for a node of autograd that `handle` keeps alive.

    The garbage collector cannot see what a node of autograd holds: a strong reference here would
    keep the model alive for ever if no backward came to remove the hook. In a backward the
    pre-backward hooks hold the model.
    """
    state_ref, handle_ref = weakref.ref(state), weakref.ref(handle)

    def held_by_a_node(*grads: object) -> None:
        state, handle = state_ref(), handle_ref()
        if state is not None and handle is not None:
            hook(state, handle, *grads)

    return held_by_a_node


# Hooks, in the backward


def _pre_backward(state: FSDPState, grad: torch.Tensor) -> torch.Tensor:
    handle, context = state.handle, state.shared
    if handle is not None and handle.phase in _IN_BACKWARD:
        return grad  # another output of the same forward came first
    with span("_pre_backward_hook"):
        if not context.final_callback_queued:
            # Normally the root's hook comes first and queues the callback on the outermost graph.
            # If nothing of the root's output is in the loss, another unit must see to it.
            queue_backward_callback(functools.partial(_end_of_backward, context))
            context.final_callback_queued = True
            gradients.reset_if_cleared(context.units)
        if handle is None:
            if state.phase is UnitPhase.IDLE:  # and not summoned, or reached before
                state.progress.on(UnitEvent.OUTPUT_GRADIENT_CAME)
            return grad
        state.require(TrainingState.IDLE)
        handle.progress.on(UnitEvent.OUTPUT_GRADIENT_CAME)
        streams = context.streams
        if not handle.is_prefetched:
            unshard(state, handle, streams.unshard, streams.pre_unshard)
        state.device_handle.current_stream().wait_stream(streams.unshard)
        # Before any prefetch, so that a mistaken one of this unit does nothing.
        context.order.record_backward(handle.unit)
        prefetch(state, handle)
        gradients.prepare_for_backward(handle)
    return grad


@torch.no_grad()
def _post_backward(state: FSDPState, handle: FlatParamHandle, *_: object) -> None:
    with span("_post_backward_hook"):
        state.require(TrainingState.FORWARD_BACKWARD)
        check(
            handle.phase in _IN_BACKWARD,
            f"Expects `BACKWARD_PRE` or `BACKWARD_POST` state but got {handle.phase}",
        )
        handle.progress.on(UnitEvent.GRADIENT_COMPLETE)
        grad = handle.flat_param.grad
        if grad is None:
            return
        if grad.requires_grad:
            raise RuntimeError("FSDP does not support gradients of gradients")
        _reshard_after_backward(state, handle)
        _reduce_or_keep(state, handle)


def _reduce_or_keep(state: FSDPState, handle: FlatParamHandle) -> None:
    if state.sync_gradients:
        handle.gradient_progress.on(GradientEvent.REDUCED)
        reduce_gradient(state, handle)
    else:
        if handle.config.uses_sharding:
            handle.gradient_progress.on(GradientEvent.KEPT)
        gradients.show_kept_grads(handle)


def _post_backward_of_frozen(state: FSDPState, handle: FlatParamHandle, *_: object) -> None:
    # The pre-backward hook did not run if the outputs required no gradient.
    handle.progress.on(UnitEvent.INPUT_GRADIENTS_COMPLETE)
    _reshard_after_backward(state, handle)


def _reshard_after_backward(state: FSDPState, handle: FlatParamHandle) -> None:
    reshard(state, handle, free=frees_in_backward(state, handle))
    prefetch(state, handle)


# The end


@torch.no_grad()
def _end_of_backward(context: RootContext) -> None:
    root = context.root
    for state, handle in zip(context.owners, context.units, strict=True):
        if gradients.is_left_behind(handle, takes_unsharded=state.sync_gradients):
            handle.progress.on(UnitEvent.LEFT_BEHIND)
            _reshard_if_left_unsharded(state, handle)
            _reduce_or_keep(state, handle)
    if root.sync_gradients:
        settle(root)
        if any(state.cpu_offload.offload_params for state in context.states):
            # The optimizer reads gradients on the host, which no stream orders.
            root.device_handle.current_stream().synchronize()
    context.order.end_iteration()
    for state in context.states:
        if state.handle is not None:
            _reshard_if_left_unsharded(state, state.handle)
            _finalize(state, state.handle)
        state.progress.on(UnitEvent.BACKWARD_ENDED)
    # Another backward may follow before the next forward.
    context.final_callback_queued = False


@torch.no_grad()
def ensure_ready(state: FSDPState) -> None:
    """Called first by every entry point: initialise lazily, and recover from an error.

    Autograd calls no final callback after an error in a backward. What that backward had computed
    is of no use, and may have been added to earlier gradients already: all are dropped.
    """
    lazy_init(state)
    context = state.shared
    if not context.final_callback_queued or is_backward_running():
        return
    context.final_callback_queued = False
    settle(context.root)
    context.order.end_iteration()
    for other in context.states:
        handle = other.handle
        if handle is not None:
            handle.progress.on(UnitEvent.LEFT_BEHIND)
            _reshard_if_left_unsharded(other, handle)
            gradients.drop(handle)
            _finalize(other, handle)
        other.progress.on(UnitEvent.BACKWARD_ENDED)


def _reshard_if_left_unsharded(state: FSDPState, handle: FlatParamHandle) -> None:
    """Reshard a unit whose post-backward hook did not run, as its output is not in the loss."""
    free = frees_in_backward(state, handle)
    if (
        handle.points_to_unsharded
        or handle.skipped_sharded_views
        or (free and handle.holds_unsharded)
    ):
        reshard(state, handle, free=free)


def _finalize(state: FSDPState, handle: FlatParamHandle) -> None:
    if handle.post_backward_hook is not None:
        handle.post_backward_hook[-1].remove()
        handle.post_backward_hook = None
    is_reduced = handle.flat_param.requires_grad and state.sync_gradients
    if is_reduced and not handle.has_optimizer_in_backward:
        gradients.hand_to_optimizer(handle)
