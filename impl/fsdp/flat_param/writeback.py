"""Write-back of replaced parameters and gradients into the flat parameter (`use_orig_params`).

The optimizer works on the original parameters, the runtime on the flat parameter that they view.
An assignment such as `linear.weight.data = ...` or `linear.weight.grad = ...` separates the two. So
before each unshard, parameters and gradients that moved to another storage are copied back. The
check compares storages only, as it runs for every parameter in every iteration.
"""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from impl.fsdp.common import check, set_flattened
from impl.fsdp.flat_param.gradients import has_unsharded_grad
from impl.fsdp.flat_param.handle import FlatParamHandle
from impl.fsdp.flat_param.packing import OrigParam, SharedParam
from impl.fsdp.flat_param.views import OrigParamViews


@torch.no_grad()
def write_back_orig_params(handle: FlatParamHandle) -> bool:
    """Copy parameters and gradients that left the flat ones back; returns whether there were any.

    Raises:
        RuntimeError: if a replaced parameter has another size than its part of the shard.
        AssertionError: if a parameter was replaced between forward and backward while the unit was
            unsharded, which autograd could not follow.
        NotImplementedError: if parameters that were tied no longer are.
    """
    views = handle.orig_views
    if views is None or handle.skips_writeback_check:
        return False
    skipped = handle.skipped_sharded_views
    if handle.config.uses_sharding and handle.points_to_unsharded and not skipped:
        return False  # unsharded by an earlier call, which checked
    flat = handle.unsharded_shown if skipped else handle.flat_param.data
    assert flat is not None
    check(
        flat.untyped_storage().size() > 0,
        "If skipped using sharded views, the unsharded flat parameter should be allocated",
    )
    wrote = False
    for index, info in enumerate(views.metadata.params):
        if not hasattr(info.module, info.name):
            continue  # deregistered for a while: a state dict is being made
        wrote |= _write_back_param(handle, views, index, flat)
        if not skipped:  # otherwise no gradients are shown
            _write_back_grad(handle, views, index)
    for shared in views.metadata.shared:
        primary = views.metadata.params[shared.primary]
        if getattr(shared.module, shared.name) is not getattr(primary.module, primary.name):
            raise NotImplementedError("Changing shared parameters is not supported yet")
    return wrote


def _write_back_param(
    handle: FlatParamHandle, views: OrigParamViews, index: int, flat: Tensor
) -> bool:
    info, part = views.metadata.params[index], handle.shard_layout.params[index]
    between_passes = handle.skipped_sharded_views
    shown = views.forward_tensors[index] if between_passes else views.params[index]
    current: Tensor = getattr(info.module, info.name)
    is_replaced = current is not shown
    has_moved = part is not None and not _same_storage(current, flat)
    if not is_replaced and not has_moved:
        return False
    if between_passes:
        raise AssertionError(
            "FSDP does not support changing the parameters between forward and backward for "
            f"{handle.config.strategy}"
        )
    if is_replaced:
        # On every rank, also one that holds nothing of it: all must agree on what to gather. The
        # old variable's gradient goes with it.
        param = current if isinstance(current, nn.Parameter) else nn.Parameter(current)
        views.params[index] = param
        set_flattened(param)
        handle.mark_outdated()
    if part is None:
        return False
    target = _target(
        handle, index, handle.flat_param.data, is_whole=not handle.config.uses_sharding
    )
    _copy(handle, current.data, target, "parameter")
    return True


def _write_back_grad(handle: FlatParamHandle, views: OrigParamViews, index: int) -> None:
    flat_param = handle.flat_param
    is_whole = not handle.config.uses_sharding or has_unsharded_grad(handle)
    if handle.shard_layout.params[index] is None and not is_whole:
        return
    grad = views.params[index].grad
    if grad is None:
        if flat_param.grad is not None:
            _target(handle, index, flat_param.grad, is_whole=is_whole).zero_()
            views.grad_is_none[index] = True
        return
    if handle.config.offload_params and not handle.config.uses_sharding:
        return  # `cpu_grad` owns the gradient for good
    if flat_param.grad is None:
        flat_param.grad = torch.zeros_like(flat_param)
    if not _same_storage(grad, flat_param.grad):
        target = _target(handle, index, flat_param.grad, is_whole=is_whole)
        _copy(handle, grad, target, "gradient")
        views.grad_is_none[index] = False


@torch.no_grad()
def adopt_replaced_params(handle: FlatParamHandle) -> None:
    """Copy what the user put in place of full parameters into the unsharded flat parameter.

    That is what `load_state_dict(assign=True)` does, or an assignment inside `summon_full_params`.
    The variables that the optimizer knows stay.
    """
    flat = handle.flat_param.data
    metadata = handle.metadata
    places: list[tuple[OrigParam | SharedParam, int]] = [
        (shared, shared.primary) for shared in metadata.shared
    ]
    # Last the primary ones: if all places of a tie were replaced, the first one counts.
    places += [(param, index) for index, param in enumerate(metadata.params)]
    for info, index in places:
        current = getattr(info.module, info.name, None)
        if isinstance(current, Tensor) and not _same_storage(current, flat):
            source = current.to_local() if isinstance(current, DTensor) else current
            _copy(handle, source.detach(), _target(handle, index, flat, is_whole=True), "parameter")


def _target(handle: FlatParamHandle, index: int, flat: Tensor, *, is_whole: bool) -> Tensor:
    """The view of original parameter `index` in `flat`, with the shape that the module shows."""
    if is_whole:
        info: OrigParam = handle.metadata.params[index]
        segment = handle.layout.params[index]
        piece = flat[segment.offset : segment.end]
        if info.stride is None:
            return piece.view(info.shape)
        return piece.as_strided(info.shape, info.stride)
    part = handle.shard_layout.params[index]
    assert part is not None
    return flat[part.offset_in_shard : part.offset_in_shard + part.numel]


def _copy(handle: FlatParamHandle, source: Tensor, target: Tensor, what: str) -> None:
    if dist.get_debug_level() == dist.DebugLevel.INFO:
        warnings.warn(
            f"[Rank {handle.rank}] {what.capitalize()} needs writeback in "
            f"{handle.phase}\n"
            f"expected shape={target.shape} shape={source.shape} "
            f"expected device={target.device} device={source.device}",
            stacklevel=2,
        )
    if source.shape != target.shape:
        raise RuntimeError(
            f"Cannot writeback when the {what} shape changes\n"
            f"Expects {target.shape} but got {source.shape}: {handle}"
        )
    target.copy_(source)


def _same_storage(a: Tensor, b: Tensor) -> bool:
    if isinstance(a, DTensor):
        a = a.to_local()
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
