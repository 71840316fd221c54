"""Coalesced all_reduce and all_gather as one operation on one flat tensor, on Gloo's wire.

Elsewhere each tensor goes by itself, which saves two copies; C++ ranks expect the flat form.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from impl.transport import lent
from impl.transport.base import CallInfo, Combine, Communicator, Deadline


def is_wanted(comm: Communicator, tensors: Sequence[object]) -> bool:
    return comm.kind == "gloo" and len(tensors) > 1


def all_reduce(
    comm: Communicator,
    tensors: Sequence[Tensor],
    combine: Combine,
    call: CallInfo,
    until: Deadline,
) -> None:
    """Reduce tensors of one dtype, each (numel,), in place."""
    flat = torch.cat(list(tensors))
    comm.all_reduce(flat, combine, call, until)
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        lent.fill(tensor, part)


def all_gather(
    comm: Communicator,
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    call: CallInfo,
    until: Deadline,
) -> None:
    """Each input (numel,) to its output (world_size * numel,). Dtypes may differ: bytes travel."""
    flat = torch.cat([each.view(torch.uint8) for each in inputs])
    gathered = flat.new_empty(flat.numel() * comm.world_size)
    comm.all_gather(gathered, flat, call, until)
    rows = gathered.view(comm.world_size, -1)
    start = 0
    for output, given in zip(outputs, inputs, strict=True):
        nbytes = given.numel() * given.element_size()
        target = output.view(torch.uint8).view(comm.world_size, nbytes)
        lent.fill(target, rows[:, start : start + nbytes])
        start += nbytes
