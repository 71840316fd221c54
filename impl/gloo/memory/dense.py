"""Flat contiguous memory of a tensor (its own, or a copy), and copying results back.

[Note: raw memory] Torch's own gloo writes to the tensors' memory behind autograd's back: no
gradient is recorded, and no version counter moves. Programs rely on it (FSDP refills a parameter's
storage between forward and backward), so tensors are taken as `.data` here, which shares memory and
nothing else.
"""

from __future__ import annotations

import torch
from torch import Tensor

from impl.transport import lent


def flat(tensor: Tensor) -> Tensor:
    """(numel,): the tensor's memory if that is contiguous, otherwise a contiguous copy.

    Complex numbers become pairs of reals, (2 * numel,).
    """
    raw = tensor.data
    if raw.is_complex():
        raw = torch.view_as_real(raw.resolve_conj().resolve_neg())
    elif raw.is_neg():
        raw = raw.resolve_neg()
    raw = raw.contiguous()
    return raw if raw.dim() == 1 else raw.view(-1)


def flat_shares_memory(tensor: Tensor) -> bool:
    """Whether `flat` returns the tensor's own memory, so that results need no copying back."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def memory_holds_elements(tensor: Tensor) -> bool:
    """Whether a contiguous tensor's memory holds its elements, and may be written to."""
    return not (tensor.is_complex() or tensor.is_neg() or tensor.is_inference())


def room_for(tensor: Tensor) -> Tensor:
    """Memory in which results for `tensor` may be received: its own or new. See `put_back`."""
    if flat_shares_memory(tensor):
        return flat(tensor)
    numel, dtype = numbers_of(tensor)
    return torch.empty(numel, dtype=dtype, device=tensor.device)


def numbers_of(tensor: Tensor) -> tuple[int, torch.dtype]:
    """How many numbers `flat` gives, and of which dtype."""
    if tensor.is_complex():
        return 2 * tensor.numel(), tensor.dtype.to_real()
    return tensor.numel(), tensor.dtype


def put_back(memory: Tensor, tensor: Tensor) -> None:
    """After `flat` or `room_for`: copy `memory` to `tensor`, unless they are the same."""
    if flat_shares_memory(tensor):
        return
    lent.fill(tensor.data, shaped(memory, tensor))


def shaped(memory: Tensor, tensor: Tensor) -> Tensor:
    """The memory as a tensor of `tensor`'s shape and dtype."""
    if tensor.is_complex():
        return torch.view_as_complex(memory.view(*tensor.shape, 2))
    return memory.view(tensor.shape)
