"""Gradient of a flat parameter: `no_sync` sums, the reduced shard, its views, unshard and reshard.

Autograd accumulates the unsharded gradient of the local batch into `flat_param.grad`. The
post-backward hook takes it away, reduces it, and leaves this rank's part in `saved_grad_shard`
(sharded strategies) or `flat_param.grad` (`NO_SHARD`), and a copy of it in `cpu_grad` when
parameters are offloaded. When the whole backward pass has ended, the reduced gradient becomes
`flat_param.grad`, which is what the optimizer sees.

Inside `no_sync()` the hook leaves the unsharded gradient where it is, and autograd adds to it.

With a sharded strategy these combinations are legal ("earlier" is the reduced sum of backwards
before, or None if the user cleared it):

| when                                | `flat_param.grad` | `saved_grad_shard` | phase             |
|-------------------------------------|-------------------|--------------------|-------------------|
| between iterations                  | earlier           | None               | SETTLED           |
| after a backward inside `no_sync()` | unsharded sum     | earlier            | UNSHARDED         |
| in a backward, before the hook      | None, or that sum | earlier            | one of these two  |
| in a backward, after it reduced     | None              | reduced            | REDUCED           |

With `NO_SHARD` the gradient, reduced or not, stays in `flat_param.grad`, and the phase is never
UNSHARDED; only with offloading an earlier one is put aside in `saved_grad_shard`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from impl.fsdp import collectives
from impl.fsdp.common import check
from impl.fsdp.flat_param.handle import FlatParamHandle
from impl.fsdp.phases import GradientEvent, GradientPhase, UnitPhase


def has_unsharded_grad(handle: FlatParamHandle) -> bool:
    """Whether `no_sync()` left an unsharded gradient to add to.

    Sizes alone cannot tell: one element on two ranks has the same size sharded and unsharded.
    """
    return _phase(handle) is GradientPhase.UNSHARDED and handle.flat_param.grad is not None


def _phase(handle: FlatParamHandle) -> GradientPhase:
    return handle.gradient_progress.phase


def reset_if_cleared(handles: Iterable[FlatParamHandle]) -> None:
    """Follow cleared gradients and `requires_grad` of original parameters (use_orig_params).

    After `zero_grad(set_to_none=True)` the flat gradient is freed too, early, as it is large. The
    flat parameter requires a gradient as long as one original parameter does.
    """
    for handle in handles:
        if handle.orig_views is None:
            continue
        params = handle.orig_views.params
        if all(param.grad is None for param in params):
            handle.flat_param.grad = None
        handle.flat_param.requires_grad = any(param.requires_grad for param in params)


def prepare_for_backward(handle: FlatParamHandle) -> None:
    """Clear `flat_param.grad` for autograd, which adds to what it finds there.

    A reduced gradient of an earlier backward is put aside and added to after the reduction.
    """
    check(
        handle.phase is UnitPhase.BACKWARD_PRE,
        f"Expects to be in `BACKWARD_PRE`, not {handle.phase}",
    )
    flat_param = handle.flat_param
    if flat_param.grad is None:
        handle.gradient_progress.on(GradientEvent.FOUND_NONE)
    elif _phase(handle) is GradientPhase.UNSHARDED:
        handle.check_unsharded_size(flat_param.grad)
    elif handle.config.uses_sharding or flat_param.grad.device != flat_param.device:
        _put_aside(handle, flat_param.grad)
        flat_param.grad = None
    # else whole on every rank: to reduce the sum again leaves the earlier part of it as it is
    handle.grad_before_backward = _identity(handle)


def _put_aside(handle: FlatParamHandle, grad: Tensor) -> None:
    check(
        grad.device == handle.device or handle.config.offload_params,
        f"Expects the sharded gradient to be on {handle.device} but got {grad.device}",
    )
    handle.check_sharded_size(grad)
    saved = grad.data
    if saved.dtype != handle.dtypes.original:
        # keep_low_precision_grads, and the user did not clear it: sums are in full precision.
        saved = saved.to(handle.dtypes.original)
    handle.saved_grad_shard = saved


def is_left_behind(handle: FlatParamHandle, *, takes_unsharded: bool) -> bool:
    """Whether the hook has left a gradient unprocessed at the end of a backward.

    takes_unsharded: the backward is outside `no_sync()`, and reduces what was accumulated in it.

    It was accumulated under `no_sync()` by a unit that this backward did not reach. Or the hook did
    not run: with low precision parameters it sits on the accumulator of the first forward, and that
    forward's result was dropped. (torch 2.13 raises in the first case and loses the gradient in
    the second.)
    """
    if _phase(handle) is GradientPhase.REDUCED or handle.flat_param.grad is None:
        return False
    if handle.phase is UnitPhase.BACKWARD_PRE and handle.grad_before_backward != _identity(handle):
        return True
    return takes_unsharded and _phase(handle) is GradientPhase.UNSHARDED


def _identity(handle: FlatParamHandle) -> tuple[int, int] | None:
    """Tells apart gradients, and a gradient from the same one after something was added."""
    grad = handle.flat_param.grad
    return None if grad is None else (grad.data_ptr(), grad._version)


def hand_to_optimizer(handle: FlatParamHandle) -> None:
    """Make the reduced gradient `flat_param.grad`, at the end of a backward pass.

    A unit that this backward did not reach gets back what was put aside. (torch 2.13 drops it, and
    with offloading presents the gradient of an earlier iteration.)
    """
    flat_param, saved = handle.flat_param, handle.saved_grad_shard
    handle.saved_grad_shard = None
    if _phase(handle) is not GradientPhase.REDUCED:
        if saved is not None:
            flat_param.grad = saved
        return
    handle.gradient_progress.on(GradientEvent.HANDED_OVER)
    if handle.config.offload_params:
        assert handle.cpu_grad is not None
        # Another tensor on the same memory, whose data may be replaced without losing `cpu_grad`.
        flat_param.grad = handle.cpu_grad.detach()
    elif handle.config.uses_sharding:
        flat_param.grad = saved
    else:
        return  # reduced in place, in the dtype that it is to keep
    show_reduced_grads(handle, flat_param.grad)
    if handle.config.keeps_low_precision_grads and not handle.forces_full_precision:
        _cast_grad(handle, handle.dtypes.compute)


def _cast_grad(handle: FlatParamHandle, dtype: torch.dtype) -> None:
    grad = handle.flat_param.grad
    if grad is not None and grad.dtype != dtype:
        # Through the data, since torch checks the dtype of what is assigned to `.grad`.
        grad.data = grad.to(dtype)
        show_sharded_grads(handle, grad)


def drop(handle: FlatParamHandle) -> None:
    """Drop all gradients: those of a failed backward, and those that they would be added to."""
    handle.flat_param.grad = None
    handle.saved_grad_shard = None
    handle.gradient_progress.on(GradientEvent.DROPPED)
    if handle.orig_views is not None:
        handle.orig_views.clear_grads()


# What the original parameters show


def show_grads(handle: FlatParamHandle) -> None:
    """Give the original parameters, which show their shards, the gradients that there are."""
    if has_unsharded_grad(handle):
        show_unsharded_grads(handle)
    else:
        show_sharded_grads(handle, handle.flat_param.grad)


def show_sharded_grads(handle: FlatParamHandle, grad: Tensor | None) -> None:
    """Give the original parameters their parts of `grad`, (chunk_numel,) (use_orig_params)."""
    views = handle.orig_views
    if views is None:
        return
    if grad is None:
        views.clear_grads()
    elif handle.config.uses_sharding:
        handle.check_sharded_size(grad)
        views.show_sharded_grads(grad, handle.shard_layout)
    else:
        handle.check_unsharded_size(grad)
        views.show_whole_grads(grad)


def show_reduced_grads(handle: FlatParamHandle, grad: Tensor | None) -> None:
    """The same after a reduction, from which every parameter that requires one has a gradient."""
    if handle.orig_views is not None:
        handle.orig_views.mark_grads_computed()
        show_sharded_grads(handle, grad)


def show_kept_grads(handle: FlatParamHandle) -> None:
    """The same after a backward under `no_sync()`, which leaves the gradient as it is.

    (torch 2.13 does not: with NO_SHARD, a parameter that was frozen goes on showing None, and the
    next forward takes its gradient for cleared.)
    """
    if handle.orig_views is not None:
        handle.orig_views.mark_grads_computed()
        show_unsharded_grads(handle)


def show_unsharded_grads(handle: FlatParamHandle) -> None:
    """Give the original parameters views into the unsharded `flat_param.grad`."""
    views = handle.orig_views
    if views is None:
        return
    grad = handle.flat_param.grad
    if grad is None:
        views.clear_grads()
    else:
        handle.check_unsharded_size(grad)
        views.show_unsharded_grads(grad)


# Unsharding outside computation


@torch.no_grad()
def unshard_grad(handle: FlatParamHandle) -> Tensor | None:
    """Gather the gradient and show it, for `summon_full_params(with_grads=True)`.

    Returns the sharded gradient, for `reshard_grad`. Ranks without a gradient contribute zeros if
    some other rank has one.
    """
    flat_param = handle.flat_param
    shard = flat_param.grad
    if not handle.config.uses_sharding:
        show_unsharded_grads(handle)
        return shard
    missing = torch.tensor([int(shard is None)], dtype=torch.int32, device=handle.device)
    dist.all_reduce(missing, group=handle.process_group)
    if missing.item() == handle.world_size:
        show_unsharded_grads(handle)
        return None
    if shard is None and dist.get_debug_level() == dist.DebugLevel.INFO:
        warnings.warn(
            f"[Rank {handle.rank}] Only some but not all ranks have a `None` `FlatParameter` "
            "gradient, so FSDP is using zeros to approximate those ranks' sharded gradients being "
            "`None`",
            stacklevel=2,
        )
    source = shard
    if source is None:
        keeps_low = handle.config.keeps_low_precision_grads
        source = torch.zeros(
            handle.shard_layout.numel,
            dtype=handle.dtypes.compute if keeps_low else handle.dtypes.original,
            device=handle.device,
        )
    handle.check_sharded_size(source)
    padded = source.new_empty(source.numel() * handle.world_size, device=handle.device)
    collectives.all_gather(
        handle.device_handle, padded, source.to(handle.device), handle.process_group
    )
    flat_param.grad = padded[: handle.layout.numel]
    show_unsharded_grads(handle)
    return shard


@torch.no_grad()
def write_back_grad(handle: FlatParamHandle, shard: Tensor | None) -> None:
    """Copy this rank's part of the unsharded gradient into `shard`, if there is one."""
    unsharded = handle.flat_param.grad
    if shard is not None and unsharded is not None and shard is not unsharded:
        handle.local_chunk(shard).copy_(handle.own_part(unsharded))


def reshard_grad(handle: FlatParamHandle, shard: Tensor | None) -> None:
    """Undo `unshard_grad`, which returned `shard`."""
    handle.flat_param.grad = shard
    show_sharded_grads(handle, shard)
