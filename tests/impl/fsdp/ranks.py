"""Rank processes of the FSDP tests, which run `function(rank, world_size, *args)`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.impl.warm_ranks import WarmRanks, default_group


class Ranks(WarmRanks):
    """Ranks that begin each call with the same seed, and on which warnings are errors."""

    def __init__(self, world_size: int, directory: Path) -> None:
        super().__init__(world_size, directory, _call)


def _call(
    rank: int, world_size: int, path: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    torch.manual_seed(0)
    with default_group(rank, world_size, path):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = function(rank, world_size, *args)
        dist.barrier()  # no rank leaves while another one still communicates with it
        return result
