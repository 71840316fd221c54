"""What a rank's function is told about where it runs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from inspect import Parameter, signature
from typing import Any

import torch
import torch.distributed as dist

from conformance.target import Target, resolve


@dataclass(frozen=True)
class Me:
    """One rank of a world, as its function sees it.

    store: a store of this world alone, for groups that a case makes by itself.
    host: where all ranks of the world can reach a server of rank 0.
    seed: differs between cases, equal on all ranks of one; `generator` differs between ranks too.
    """

    rank: int
    world_size: int
    device: torch.device
    target: Target
    store: dist.Store
    seed: int
    group_timeout_s: float
    host: str = "127.0.0.1"

    @cached_property
    def generator(self) -> torch.Generator:
        """A CPU generator of random numbers, seeded for this case and rank."""
        return torch.Generator().manual_seed(self.seed + 1000 * self.rank)

    @cached_property
    def options(self) -> Any:
        """The target's `pg_options`, or None."""
        return resolve(self.target.options)() if self.target.options else None

    def ddp(self, module: torch.nn.Module, **kwargs: Any) -> Any:
        """The module in the target's DistributedDataParallel."""
        return resolve(self.target.ddp)(module, **kwargs)

    def fsdp(self, module: torch.nn.Module, **kwargs: Any) -> Any:
        """The module in the target's FullyShardedDataParallel, on this rank's device.

        On the CPU, a wrapper that takes no `device_id` is called without it.
        """
        wrapper = resolve(self.target.fsdp)
        taken = signature(wrapper).parameters.values()
        takes_it = any(p.name == "device_id" or p.kind is Parameter.VAR_KEYWORD for p in taken)
        if self.device.type != "cpu" or takes_it:
            kwargs.setdefault("device_id", self.device)
        return wrapper(module, **kwargs)

    def sync_batchnorm(self) -> Any:
        """The target's SyncBatchNorm class."""
        return resolve(self.target.sync_batchnorm)
