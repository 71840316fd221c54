"""PyTorch-Ignite's `auto_model`, called like torch's DistributedDataParallel."""

from __future__ import annotations

import os
from typing import Any

import ignite.distributed as idist
import torch.distributed as dist
from torch import nn


def auto_model(module: nn.Module, **arguments: Any) -> Any:
    """The module as `auto_model` wraps it; it passes all arguments on to torch.

    It leaves the module of a single rank as it is, without DDP's methods; here, torch wraps it.
    """
    if dist.get_world_size() == 1:
        return nn.parallel.DistributedDataParallel(module, **arguments)
    os.environ["LOCAL_RANK"] = str(dist.get_rank())  # as torchrun sets it
    idist.sync()  # it has made no group itself, and may remember one that is gone
    return idist.auto_model(module, **arguments)
