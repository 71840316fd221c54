"""Small networks with activation checkpoints around chosen layers, for cases under DDP."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from conformance.oracle.data import seeded_generator
from conformance.spec.ties import Tied

WIDTH = 3

REENTRANT, NON_REENTRANT = "reentrant", "non-reentrant"

both_kinds = pytest.mark.parametrize("how", [REENTRANT, NON_REENTRANT])

# What a forward pass runs, one after the other: a number is a layer, a tuple is a checkpoint
# around what is in it.
Path = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Recipe:
    """A network of linear layers as plain data.

    paths: the first call takes the first path, the next call the next one, and so on in a circle.
    count: of layers, whether or not a path uses them.
    tied: all layers share the first one's weight, and have biases of their own.
    frozen: layers whose parameters require no gradient.
    """

    paths: tuple[Path, ...]
    count: int = 2
    tied: bool = False
    frozen: tuple[int, ...] = ()

    def make(self, how: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> Network:
        """The network; how: which of torch's two checkpoints is used, "" for neither."""
        with seeded_generator(seed):
            return Network(self, how).to(dtype)


class Network(Tied):
    """Layers with tanh after each."""

    def __init__(self, recipe: Recipe, how: str) -> None:
        super().__init__()
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(recipe.count)]
        for i, layer in enumerate(layers):
            if recipe.tied:
                layer.weight = layers[0].weight
            if i in recipe.frozen:
                layer.requires_grad_(False)
        self.layers = nn.ModuleList(layers)
        self.paths = recipe.paths
        self.how = how
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        path = self.paths[self.calls % len(self.paths)]
        self.calls += 1
        return self._along(path, x)

    def _along(self, path: Path, x: Tensor) -> Tensor:
        for step in path:
            if isinstance(step, int):
                x = torch.tanh(self.layers[step](x))
            else:
                x = recomputed(partial(self._along, step), x, how=self.how)
        return x


def recomputed(function: Any, *args: Any, how: str, **kwargs: Any) -> Any:
    """What the function returns; unless `how` is "", backward will call it once more."""
    if not how:
        return function(*args, **kwargs)
    return checkpoint(function, *args, use_reentrant=how == REENTRANT, **kwargs)


ONCE = Recipe(((0, (1,)),))
EVERY_LAYER = Recipe((((0,), (1,)),))
WHOLE = Recipe((((0, 1),),))
NESTED = Recipe((((0, (1, (2,))),),), count=3)
TWICE = Recipe(((0, (1,), (1,)),))
TWICE_TIED = Recipe(((0, (1,), (1,)),), tied=True)
EVERY_TIED = Recipe((((0,), (1,)),), tied=True)
UNUSED = Recipe(((0, (1,)),), count=3)
DYNAMIC = Recipe((((1,),), ((0,),)))
DYNAMIC_TIED = Recipe((((1,),), ((0,),)), tied=True)
PLAIN = Recipe(((0, 1),))
PLAIN_TIED = Recipe(((0, 1),), tied=True)
