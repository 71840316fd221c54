"""Lightning Fabric's `DDPStrategy` with the signature of torch's wrapper.

Fabric makes the group, the wrapper and the module around it by itself (`Fabric.launch` and
`Fabric.setup`). Here the group exists already, so the parts are put together one by one.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning_fabric.strategies import DDPStrategy
from lightning_fabric.wrappers import _FabricModule
from torch import nn


class FabricDDP(_FabricModule):  # type: ignore[misc]  # lightning-fabric may be missing
    """Keyword arguments go on to torch's DistributedDataParallel."""

    def __init__(self, module: nn.Module, **kwargs: Any) -> None:
        strategy = DDPStrategy(parallel_devices=[torch.device("cpu")], **kwargs)
        super().__init__(strategy.setup_module(module), strategy, module)
