"""accelerate's way to DistributedDataParallel, called like torch's."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedDataParallelKwargs
from torch import nn


def prepared(
    module: nn.Module,
    *,
    broadcast_buffers: bool = True,
    bucket_cap_mb: Any = 25,
    find_unused_parameters: bool = False,
    gradient_as_bucket_view: bool = False,
    static_graph: bool = False,
) -> Any:
    """The module as `Accelerator.prepare` wraps it; the arguments are those that it passes on."""
    launched_as(dist.get_rank(), dist.get_world_size())
    arguments = DistributedDataParallelKwargs(
        broadcast_buffers=broadcast_buffers,
        bucket_cap_mb=bucket_cap_mb,
        find_unused_parameters=find_unused_parameters,
        gradient_as_bucket_view=gradient_as_bucket_view,
        static_graph=static_graph,
    )
    return Accelerator(cpu=True, kwargs_handlers=[arguments]).prepare(module)


def launched_as(rank: int, world_size: int) -> None:
    """What `accelerate launch` tells each process; and forgets the group that was there before."""
    AcceleratorState._reset_state(reset_partial_state=True)
    place = {"RANK": rank, "LOCAL_RANK": rank}
    sizes = {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in (place | sizes).items()})
