"""Gradient reduction of a unit: reduce-scatter, all-reduce, comm hook, casts, offload, summing up.

All of it runs on the post-backward stream (hybrid sharding: its second half on the all-reduce
stream) while the backward pass goes on. So each step writes into a tensor that exists beforehand,
and nothing here looks at values.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from impl.device import DeviceHandle
from impl.fsdp import collectives
from impl.fsdp.common import check
from impl.fsdp.flat_param import gradients
from impl.fsdp.flat_param.handle import FlatParamHandle
from impl.fsdp.step.state import FSDPState
from impl.torch_private import FSDP_LOW_PRECISION_HOOKS


def reduce_gradient(state: FSDPState, handle: FlatParamHandle) -> None:
    """Take `flat_param.grad`, (layout.numel,), and start its reduction.

    Afterwards this rank's part is on its way to `saved_grad_shard` (sharded strategies, where it is
    added to what is there), or the whole to `flat_param.grad` (`NO_SHARD`).
    """
    device, streams = state.device_handle, state.shared.streams
    grad = handle.flat_param.grad
    assert grad is not None
    computed = grad.data
    streams.post_backward.wait_stream(device.current_stream())
    with device.use_stream(streams.post_backward):
        if handle.config.uses_sharding:
            # Cleared at once: a second backward must not add to what is being reduced.
            handle.flat_param.grad = None
            _reduce_scatter(state, handle, computed)
        else:
            _all_reduce_in_place(state, handle, computed)
        # Allocated on the compute stream, read on this one.
        device.record_stream(computed, streams.post_backward)


def _reduce_scatter(state: FSDPState, handle: FlatParamHandle, computed: Tensor) -> None:
    device, streams, factors = state.device_handle, state.shared.streams, state.divide_factors
    padded_numel = handle.shard_layout.numel * handle.world_size
    group, dtype = handle.process_group, _reduce_dtype(state, handle, computed)
    source = _cast_and_pad(device, computed, dtype, padded_numel, group)
    shard = source.new_empty(handle.shard_layout.numel)
    if state.comm_hook is not None:
        device.flush()
        state.comm_hook(state.comm_hook_state, source, shard)
        _finish(state, handle, shard)
        return
    collectives.divide(device, source, factors.before)
    collectives.reduce_scatter(device, shard, source, handle.process_group)
    if state.inter_node_group is None:
        collectives.divide(device, shard, factors.after)
        _finish(state, handle, shard)
        return
    streams.all_reduce.wait_stream(streams.post_backward)
    with device.use_stream(streams.all_reduce):
        device.record_stream(shard, streams.all_reduce)
        collectives.all_reduce(device, shard, state.inter_node_group)
        collectives.divide(device, shard, factors.after)
        _finish(state, handle, shard)


def _all_reduce_in_place(state: FSDPState, handle: FlatParamHandle, computed: Tensor) -> None:
    device, factors, grad = state.device_handle, state.divide_factors, handle.flat_param.grad
    assert grad is not None
    grad.data = _cast_and_pad(
        device, computed, _reduce_dtype(state, handle, computed), computed.numel()
    )
    if state.comm_hook is not None:
        device.flush()
        state.comm_hook(state.comm_hook_state, grad)
    else:
        collectives.divide(device, grad.data, factors.before)
        collectives.all_reduce(device, grad.data, state.replica_group)
        collectives.divide(device, grad.data, factors.after)
    if not handle.config.keeps_low_precision_grads:
        grad.data = _cast_to_param_dtype(state, handle, grad.data)
    reduced = grad.data
    if handle.saved_grad_shard is not None:  # put aside on CPU by an earlier backward
        reduced = _accumulate(device, handle, reduced)
    _publish(state, handle, reduced)


def _finish(state: FSDPState, handle: FlatParamHandle, shard: Tensor) -> None:
    """Cast the reduced `shard` to the parameter's dtype and add it to an earlier one."""
    shard = _cast_to_param_dtype(state, handle, shard)
    handle.saved_grad_shard = _accumulate(state.device_handle, handle, shard)
    _publish(state, handle, handle.saved_grad_shard)


def _publish(state: FSDPState, handle: FlatParamHandle, reduced: Tensor) -> None:
    """Offload the gradient, and let an optimizer in the backward have it.

    A shard is shown at the end of the backward. It is filled only by a wait for the
    reduction, which after an error in the backward is too late for an optimizer.
    """
    device = state.device_handle
    shown = reduced
    if handle.config.offload_params:
        target = handle.cpu_grad_buffer()
        # The optimizer runs on the host at once if it runs in the backward pass, else after the
        # end of it, which synchronizes. A replicated gradient is not copied asynchronously either:
        # torch found wrong values there.
        non_blocking = handle.config.uses_sharding and not handle.has_optimizer_in_backward
        device.enqueue(
            lambda: target.copy_(reduced, non_blocking=non_blocking),
            reads=(reduced,),
            writes=(target,),
        )
        shown = target
    if not handle.config.uses_sharding:
        gradients.show_reduced_grads(handle, shown)
    if handle.has_optimizer_in_backward:
        _step_optimizers(device, handle)


def _step_optimizers(device: DeviceHandle, handle: FlatParamHandle) -> None:
    """Step the optimizers that the user attached to the original parameters, and free gradients."""
    assert handle.orig_views is not None
    device.flush()
    gradients.hand_to_optimizer(handle)
    for param in handle.orig_views.params:
        if param.grad is None:  # nothing of it in this rank's shard
            continue
        optimizers = getattr(param, "_in_backward_optimizers", ())
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:  # not before, as they may share the gradient
            optimizer.zero_grad(set_to_none=True)
    gradients.reset_if_cleared([handle])
    if handle.config.offload_params:
        handle.cpu_grad = None


def _uses_low_precision_hook(state: FSDPState) -> bool:
    return state.comm_hook in FSDP_LOW_PRECISION_HOOKS


def _reduce_dtype(state: FSDPState, handle: FlatParamHandle, grad: Tensor) -> torch.dtype:
    """The dtype to reduce in: as configured, unless a hook casts or precision is forced."""
    if _uses_low_precision_hook(state) or handle.forces_full_precision:
        return grad.dtype
    return handle.dtypes.reduce


def _cast_and_pad(
    device: DeviceHandle,
    tensor: Tensor,
    dtype: torch.dtype,
    padded_numel: int,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """`tensor` in `dtype`, with zeros up to `padded_numel` elements; itself if it is so already.

    group: the one that reduces it next.
    """
    numel = tensor.numel()
    if tensor.dtype == dtype and numel == padded_numel:
        return tensor
    if group is None:
        result = tensor.new_empty(padded_numel, dtype=dtype)
    else:
        result = collectives.new_input(tensor, padded_numel, group, dtype)

    def fill() -> None:
        result[:numel].copy_(tensor)
        result[numel:].zero_()

    device.enqueue(fill, reads=(tensor,), writes=(result,))
    return result


def _cast_to_param_dtype(state: FSDPState, handle: FlatParamHandle, grad: Tensor) -> Tensor:
    """The optimizer works in the parameter's dtype. A compressing hook has cast already."""
    if _uses_low_precision_hook(state):
        return grad.data
    dtype = handle.flat_param.dtype
    if grad.dtype == dtype:
        return grad
    return _cast_and_pad(state.device_handle, grad, dtype, grad.numel())


def _accumulate(device: DeviceHandle, handle: FlatParamHandle, grad: Tensor) -> Tensor:
    """The sum of `grad` and what an earlier backward, or an earlier run of the hook, left."""
    saved = handle.saved_grad_shard
    if saved is None:
        return grad
    check(
        saved.shape == grad.shape,
        "Shape mismatch when accumulating gradients: "
        f"existing gradient shape={saved.shape} new gradient shape={grad.shape}",
    )
    if device.holds(saved):
        device.enqueue(lambda: saved.add_(grad), reads=(saved, grad), writes=(saved,))
        return saved
    # Offloaded: the sum is formed on the device, in stream order. (torch 2.13 drops `saved`.)
    moved = torch.empty_like(grad)
    device.enqueue(lambda: moved.copy_(saved, non_blocking=True), reads=(saved,), writes=(moved,))
    device.enqueue(lambda: grad.add_(moved), reads=(grad, moved), writes=(grad,))
    return grad
