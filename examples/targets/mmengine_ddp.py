"""MMEngine's DistributedDataParallel, whose first parameter is not the module."""

from __future__ import annotations

from typing import Any

from mmengine.model import MMDistributedDataParallel
from torch import nn


class Wrapped(MMDistributedDataParallel):  # type: ignore[misc]  # mmengine may be missing
    """MMEngine's, with the module in front."""

    def __init__(self, module: nn.Module, **arguments: Any) -> None:
        super().__init__(module=module, **arguments)
