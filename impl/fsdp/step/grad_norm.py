"""`clip_grad_norm_`: norm of the sharded gradients over all ranks, and clipping by it."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from impl.fsdp.step.state import FSDPState


@dataclass
class _Parameters:
    """Parameters with a gradient, each once, in a fixed order (the norm must be reproducible)."""

    sharded: list[nn.Parameter] = field(default_factory=list)
    replicated: list[nn.Parameter] = field(default_factory=list)

    @property
    def grads(self) -> list[Tensor]:
        return [p.grad for p in (*self.sharded, *self.replicated) if p.grad is not None]

    @property
    def norm_dtype(self) -> torch.dtype:
        """float32, or float64 if a parameter has it: the same on ranks that lack gradients."""
        dtypes = [param.dtype for param in (*self.sharded, *self.replicated)]
        return functools.reduce(torch.promote_types, dtypes, torch.float32)


@torch.no_grad()
def clip_grad_norm(state: FSDPState, max_norm: float, norm_type: float) -> Tensor:
    """Scale all gradients below the root `state` so that their norm is at most `max_norm`.

    Shards are summed over the ranks that share them; what every rank has in full (`NO_SHARD`,
    ignored parameters) and what replicas repeat (hybrid sharding) counts once.

    Returns the norm before clipping, a scalar of the widest dtype among the gradients.
    """
    context = state.shared
    if not any(handle.config.uses_sharding for handle in context.units):
        return torch.nn.utils.clip_grad_norm_(state.wrapper.parameters(), max_norm, norm_type)
    params = _collect(state)
    device = state.compute_device
    sharded_norm = _local_norm(params.sharded, norm_type, params.norm_dtype)
    replicated_norm = _local_norm(params.replicated, norm_type, params.norm_dtype)
    # A rank without a part of any sharded parameter still takes part.
    nothing = torch.zeros((), device=device, dtype=params.norm_dtype)
    total = nothing if sharded_norm is None else sharded_norm.to(device)
    if norm_type == math.inf:
        if replicated_norm is not None:
            total = torch.maximum(total, replicated_norm.to(device))
        dist.all_reduce(total, op=dist.ReduceOp.MAX, group=state.process_group)
    else:
        total = total**norm_type if sharded_norm is not None else total
        dist.all_reduce(total, group=state.process_group)
        if replicated_norm is not None:
            total += replicated_norm.to(device) ** norm_type
        total = total ** (1.0 / norm_type)
    if state.cpu_offload.offload_params:
        total = total.cpu()
    grads = params.grads
    # Also where it is 1: to find out would make the host wait for the device.
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for grad in grads:
        grad.mul_(factor.to(grad.device, grad.dtype))
    if not grads:
        warnings.warn(
            f"Called FSDP.clip_grad_norm_() on rank {state.rank} with no gradients -- returning "
            f"the total norm in the default dtype {total.dtype}",
            stacklevel=4,
        )
        return total
    return total.to(functools.reduce(torch.promote_types, [grad.dtype for grad in grads]))


def _collect(state: FSDPState) -> _Parameters:
    result = _Parameters()
    seen: set[nn.Parameter] = set()

    def add(target: list[nn.Parameter], params: Iterable[nn.Parameter]) -> None:
        for param in params:
            if param not in seen:
                seen.add(param)
                target.append(param)

    for handle in state.shared.units:
        target = result.sharded if handle.config.uses_sharding else result.replicated
        views = handle.orig_views
        add(target, views.params if views is not None else [handle.flat_param])
    add(result.replicated, state.wrapper.parameters())
    return result


def _local_norm(
    params: Iterable[nn.Parameter], norm_type: float, dtype: torch.dtype
) -> Tensor | None:
    """The norm of this rank's gradients as one vector, in `dtype` as ranks are summed next.

    (torch 2.13 has float32 always, and raises for float64.)
    """
    norms: list[Tensor] = [
        torch.linalg.vector_norm(param.grad.detach(), norm_type, dtype=dtype)
        for param in params
        if param.grad is not None
    ]
    if not norms:
        return None
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type, dtype=dtype)
    return norm
