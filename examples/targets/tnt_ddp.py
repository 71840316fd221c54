"""TorchTNT's `prepare_ddp`, called like torch's DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchtnt.utils.prepare_module import DDPStrategy, prepare_ddp


def prepared(
    module: nn.Module,
    *,
    output_device: Any = None,
    dim: int = 0,
    broadcast_buffers: bool = True,
    bucket_cap_mb: Any = 25,
    find_unused_parameters: bool = False,
    check_reduction: bool = False,
    gradient_as_bucket_view: bool = False,
    static_graph: bool = False,
) -> Any:
    """The module as `prepare_ddp` wraps it on the CPU; the arguments are those of its strategy.

    It has `process_group`, too, but copies it deeply, which raises a TypeError for every group.
    """
    strategy = DDPStrategy(
        output_device=output_device,
        dim=dim,
        broadcast_buffers=broadcast_buffers,
        bucket_cap_mb=bucket_cap_mb,
        find_unused_parameters=find_unused_parameters,
        check_reduction=check_reduction,
        gradient_as_bucket_view=gradient_as_bucket_view,
        static_graph=static_graph,
    )
    return prepare_ddp(module, torch.device("cpu"), strategy)
