"""How much memory a step takes at its peak, and what it leaves: not more with every unit."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from conformance import Chapter, Me, Ranks, assert_that, world_sizes
from conformance.spec.facts import rows
from conformance.spec.fully_shard.recipes import mesh_of

NEEDS = ("op:all_gather_into_tensor", "op:reduce_scatter_tensor", "dtype:float32", "reduce_op:sum")

chapter = Chapter(
    "fully_shard",
    source="torch 2.13 docs, fully_shard: parameters are freed after use to save memory",
    needs=NEEDS,
)

WIDTH = 64
UNIT_NBYTES = 4 * WIDTH**2  # of a unit's whole parameters
UNITS = 16


class Meter(TorchDispatchMode):
    """The memory of the tensors that operators have made while it was active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # in torch
        self.peak_nbytes = 0
        self._storages: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # it calls operators on what it is made of
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                self._storages[id(storage)] = weakref.ref(storage)
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes())
        return result

    def nbytes(self) -> int:
        """Of those that are there."""
        self._storages = {key: ref for key, ref in self._storages.items() if ref() is not None}
        found = [ref() for ref in self._storages.values()]
        return sum(storage.nbytes() for storage in found if storage is not None)


@dataclass(frozen=True, slots=True)
class Taken:
    """By one step, in sizes of a unit: at the peak of the forward, at that of the whole step, and
    what is left when gradients have been dropped."""

    forward: float
    step: float
    left: float


def taken(me: Me) -> Taken:
    """By the second step of a model of layers, each a unit; its root has nothing of its own."""
    layers = [nn.Linear(WIDTH, WIDTH, bias=False).to(me.device) for _ in range(UNITS)]
    mesh = mesh_of(me)
    for layer in layers:
        me.fully_shard(layer, mesh=mesh)
    model = me.fully_shard(nn.Sequential(*layers), mesh=mesh)
    x = torch.ones(1, WIDTH, device=me.device)
    model(x).sum().backward()
    model.zero_grad()
    with Meter() as meter:
        loss = model(x).sum()
        forward = meter.peak_nbytes
        loss.backward()
        step = meter.peak_nbytes
        model.zero_grad()
        del loss
    found = (nbytes / UNIT_NBYTES for nbytes in (forward, step, meter.nbytes()))
    return Taken(*found)


@dataclass(frozen=True, slots=True)
class Limit:
    """units: how many whole units there may be, beside gradients' shards. of: a field of Taken."""

    of: str
    units: float
    has_gradients: bool = False


LIMITS = rows(
    (
        chapter.must(
            "fully_shard/peak-of-a-forward",
            "A forward of many units has memory for half of them at most: for the one that "
            "computes, for what is gathered, and for what was gathered before.",
        ),
        Limit("forward", UNITS / 2),
    ),
    (
        chapter.must(
            "fully_shard/peak-of-a-step",
            "A step of many units has memory for half of them at most, beside the gradients' "
            "shards: also for whole gradients, and for what is reduced.",
            rests_on="fully_shard/peak-of-a-forward",
        ),
        Limit("step", UNITS / 2, has_gradients=True),
    ),
    (
        chapter.must(
            "fully_shard/left-by-a-step",
            "When the gradients of a step of many units have been dropped, memory for a quarter of "
            "the units is left of it at most.",
        ),
        Limit("left", UNITS / 4),
    ),
)


@world_sizes(2)
@pytest.mark.parametrize("limit", LIMITS)
def test_memory_of_a_step(ranks: Ranks, limit: Limit) -> None:
    most = limit.units + limit.has_gradients * UNITS / ranks.world_size
    for rank, each in enumerate(ranks.run(taken)):
        found = getattr(each, limit.of)
        said = f"{limit.of}: memory of {found:.2f} of {UNITS} units, {most:.2f} is the most"
        assert_that(found <= most, said, rank)
