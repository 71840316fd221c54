"""The target's DDP, FSDP and SyncBatchNorm, or torch's, for cases about something else."""

from __future__ import annotations

from typing import Any

from torch import nn

from conformance import Me
from conformance.target import resolve


def in_ddp(me: Me, module: nn.Module, **kwargs: Any) -> Any:
    """The module in the target's DistributedDataParallel, or in torch's."""
    if me.target.ddp:
        return me.ddp(module, **kwargs)
    return nn.parallel.DistributedDataParallel(module, **kwargs)


def fsdp_of(me: Me) -> Any:
    """The target's FullyShardedDataParallel class, or torch's."""
    return resolve(me.target.fsdp or "torch.distributed.fsdp:FullyShardedDataParallel")


def sync_batchnorm_of(me: Me) -> Any:
    """The target's SyncBatchNorm class, or torch's."""
    return resolve(me.target.sync_batchnorm or "torch.nn:SyncBatchNorm")
