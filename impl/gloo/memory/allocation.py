"""Tensors in memory that the ranks of a group share, or ordinary ones where there is none."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from impl.transport.base import Communicator
from impl.transport.shm import ShmCommunicator, arena

logger = logging.getLogger(__name__)


def is_supported(comm: Communicator, device: torch.device) -> bool:
    return (
        device.type == "cpu"
        and isinstance(comm, ShmCommunicator)
        and comm.world_size > 1
        and arena.limit_nbytes() > 0
    )


def allocate(
    comm: Communicator, size: int | Sequence[int], dtype: torch.dtype | None, device: torch.device
) -> Tensor:
    """Uninitialised, registered if it can be. See `ProcessGroupGloo.allocate_tensor`."""
    shape = torch.Size([size] if isinstance(size, int) else size)
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if is_supported(comm, device) and isinstance(comm, ShmCommunicator):
        tensor = comm.allocate(shape.numel(), dtype)
        if tensor is not None:
            return tensor.view(shape)
        logger.info("Ordinary memory for a tensor of %s %s", dtype, tuple(shape))
    return torch.empty(shape, dtype=dtype, device=device)
