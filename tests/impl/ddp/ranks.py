"""Rank processes of the DDP tests, which run `function(rank, *args)`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.impl.warm_ranks import WarmRanks, default_group


class Ranks(WarmRanks):
    """Ranks that begin each call with a seed of their own. Results must not be on a device."""

    def __init__(self, world_size: int, directory: Path) -> None:
        super().__init__(world_size, directory, _call)


def _call(
    rank: int, world_size: int, path: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    torch.manual_seed(rank)
    with default_group(rank, world_size, path):
        return function(rank, *args)
