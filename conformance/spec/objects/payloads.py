"""Values of many kinds that object collectives must carry."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import torch


@dataclass
class Shipment:
    """An instance of a class of our own, with a tensor in it."""

    owner: int
    weights: torch.Tensor
    notes: list[str] = field(default_factory=list)


class WithState:
    """Pickles itself by a state of its own."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.doubled = 2 * number

    def __getstate__(self) -> int:
        return self.number

    def __setstate__(self, number: int) -> None:
        self.__init__(number)  # type: ignore[misc]  # as pickle users do

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WithState) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]  # equal by its state, which may change


def things_of(rank: int) -> list[object]:
    """One of each kind, different on each rank."""
    return [
        None,
        rank,
        -1.5 * rank,
        f"rank {rank} \N{SNOWMAN}",
        bytes(range(rank + 1)),
        [],
        {"nested": [rank, (rank, {rank})], rank: None},
        OrderedDict([("b", rank), ("a", 0)]),
        torch.arange(3 + rank, dtype=torch.int16).reshape(1, -1),
        torch.full((2,), rank + 0.5, dtype=torch.bfloat16),
        torch.zeros(0),
        Shipment(rank, torch.ones(rank + 1), ["fragile"] * rank),
        WithState(rank),
        Shipment,
        slice(rank, None, 2),
    ]
