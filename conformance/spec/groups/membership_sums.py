"""Sums that show which ranks have contributed, each with a power of two of its own."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from conformance import Me


def mark(me: Me) -> Tensor:
    """What this rank adds: a power of two of its own."""
    return torch.full((3,), 2.0**me.rank, device=me.device)


def sum_of_marks(ranks: Iterable[int]) -> Tensor:
    """What the sum over these global ranks is, and no other set of ranks gives."""
    return torch.full((3,), float(sum(2**rank for rank in ranks)))


def sum_marks(me: Me, group: dist.ProcessGroup | None = None) -> Tensor:
    """Reduce the marks in a group; on a rank that is no member, its own mark, untouched."""
    x = mark(me)
    if dist.get_rank(group) >= 0:
        dist.all_reduce(x, group=group)
    return x
