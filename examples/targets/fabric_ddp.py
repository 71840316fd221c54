"""Lightning Fabric's strategy for DistributedDataParallel, called like torch's wrapper."""

from __future__ import annotations

from typing import Any

import torch
from lightning_fabric.strategies import DDPStrategy
from torch import nn


def set_up(module: nn.Module, **arguments: Any) -> Any:
    """The module as the strategy wraps it; it passes all arguments on to torch."""
    strategy = DDPStrategy(parallel_devices=[torch.device("cpu")], **arguments)
    return strategy.setup_module(module)
