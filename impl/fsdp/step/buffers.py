"""Mixed precision of buffers: casts for computation, and back for eval or state dicts."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from impl.fsdp.common import clean_tensor_name
from impl.fsdp.step.state import FSDPState


def original_dtypes(module: nn.Module) -> dict[str, torch.dtype]:
    """The dtype of every buffer of `module`, by its name without wrapper prefixes."""
    return {clean_tensor_name(name): buffer.dtype for name, buffer in module.named_buffers()}


def computation_dtypes(states: Iterable[FSDPState]) -> list[tuple[Tensor, torch.dtype | None]]:
    """Each buffer under `states` with its dtype in a forward (None: as it is).

    The innermost instance decides; `states` come outermost first.
    """
    decided: set[Tensor] = set()
    result: list[tuple[Tensor, torch.dtype | None]] = []
    for state in reversed(list(states)):
        for name, buffer in state.wrapper.named_buffers():
            if buffer in decided:
                continue
            decided.add(buffer)
            if clean_tensor_name(name) not in state.ignored_buffer_names:
                result.append((buffer, state.mixed_precision.buffer_dtype))
    return result


def cast_and_move(
    buffers: Iterable[tuple[Tensor, torch.dtype | None]], device: torch.device
) -> None:
    """Put each buffer in place on `device` and, if it is floating point, in its dtype."""
    for buffer, dtype in buffers:
        if dtype is None or not buffer.is_floating_point():
            dtype = buffer.dtype
        if buffer.dtype != dtype or buffer.device != device:
            buffer.data = buffer.to(device=device, dtype=dtype)


def set_precision_for_forward(root: FSDPState) -> None:
    """Raise buffers to full precision for an eval forward, or lower them again after one."""
    context = root.shared
    handles = [root.handle] if root.handle is not None else context.units
    if any(handle.forces_full_precision for handle in handles):
        cast_and_move(
            (
                (buffer, root.buffer_dtypes.get(clean_tensor_name(name)))
                for name, buffer in root.module.named_buffers()
            ),
            root.compute_device,
        )
        context.buffers_in_full_precision = True
    elif context.buffers_in_full_precision:
        cast_and_move(computation_dtypes(context.states), root.compute_device)
        context.buffers_in_full_precision = False
