"""Posts isend or irecv in the default group and returns its Work, which is never None."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor


def post(x: Tensor, peer: int, tag: int = 0, *, is_send: bool) -> dist.Work:
    """Post a send or a receive of the default group and return its handle."""
    work = dist.isend(x, peer, tag=tag) if is_send else dist.irecv(x, peer, tag=tag)
    assert work is not None, "a member of the group gets a handle"
    return work
