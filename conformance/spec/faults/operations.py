"""One call of every kind of collective, for cases in which a rank does not take part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from conformance import Me, needs

_NUMEL = 1000


def all_reduce(me: Me, group: Any = None) -> None:
    dist.all_reduce(torch.ones(_NUMEL, device=me.device), group=group)


def broadcast(me: Me, group: Any = None, root: int = 0) -> None:
    dist.broadcast(torch.ones(_NUMEL, device=me.device), root, group=group)


def reduce(me: Me, group: Any = None) -> None:
    dist.reduce(torch.ones(_NUMEL, device=me.device), 0, group=group)


def all_gather(me: Me, group: Any = None) -> None:
    outputs = [torch.zeros(_NUMEL, device=me.device) for _ in range(me.world_size)]
    dist.all_gather(outputs, torch.ones(_NUMEL, device=me.device), group=group)


def reduce_scatter(me: Me, group: Any = None) -> None:
    inputs = [torch.ones(_NUMEL, device=me.device) for _ in range(me.world_size)]
    dist.reduce_scatter(torch.zeros(_NUMEL, device=me.device), inputs, group=group)


def all_to_all_single(me: Me, group: Any = None) -> None:
    x = torch.ones(_NUMEL * me.world_size, device=me.device)
    dist.all_to_all_single(torch.zeros_like(x), x, group=group)


def gather(me: Me, group: Any = None) -> None:
    outputs = [torch.zeros(_NUMEL, device=me.device) for _ in range(me.world_size)]
    x = torch.ones(_NUMEL, device=me.device)
    dist.gather(x, outputs if me.rank == 0 else None, 0, group=group)


def scatter(me: Me, group: Any = None, root: int = 0) -> None:
    inputs = [torch.ones(_NUMEL, device=me.device) for _ in range(me.world_size)]
    x = torch.zeros(_NUMEL, device=me.device)
    dist.scatter(x, inputs if me.rank == root else None, root, group=group)


def barrier(me: Me, group: Any = None) -> None:
    dist.barrier(group=group)


def all_gather_object(me: Me, group: Any = None) -> None:
    got: list[Any] = [None] * me.world_size
    dist.all_gather_object(got, "x" * _NUMEL, group=group)


def large_all_reduce(me: Me, group: Any = None) -> None:
    dist.all_reduce(torch.ones(1 << 20, device=me.device), group=group)


OPERATIONS: dict[str, Callable[..., None]] = {
    "broadcast": broadcast,
    "all_reduce": all_reduce,
    "large_all_reduce": large_all_reduce,
    "reduce": reduce,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_to_all_single": all_to_all_single,
    "gather": gather,
    "scatter": scatter,
    "barrier": barrier,
    "all_gather_object": all_gather_object,
}

_OP_OF = {"large_all_reduce": "all_reduce", "all_gather_object": "all_gather"}

AS_PARAMETERS = [
    pytest.param(name, marks=needs(f"op:{_OP_OF.get(name, name)}")) for name in OPERATIONS
]
"""The names, for `pytest.mark.parametrize`; each needs what its operation needs."""

ALL_NEEDED = sorted({f"op:{_OP_OF.get(name, name)}" for name in OPERATIONS})
