"""`Me`, the argument of functions that ranks run: rank, device, store, seed, target's wrappers."""

from __future__ import annotations

import contextlib
import json
import pickle
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from conformance.harness.wrapping import LacksArgument, arguments_for
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
        """The module in the target's DistributedDataParallel.

        Raises LacksArgument if that has not all the arguments, and they are not torch's defaults.
        """
        wrapper = resolve(self.target.ddp)
        of_torch = torch.nn.parallel.DistributedDataParallel
        named = self.target.arguments.get("ddp")
        return wrapper(module, **arguments_for(wrapper, of_torch, kwargs, named))

    def fsdp(self, module: torch.nn.Module, **kwargs: Any) -> Any:
        """The module in the target's FullyShardedDataParallel, on this rank's device.

        On the CPU, a wrapper that takes no `device_id` is called without it.
        Raises LacksArgument as `ddp` does.
        """
        from torch.distributed.fsdp import FullyShardedDataParallel  # takes most of a second

        wrapper = resolve(self.target.fsdp)
        named = self.target.arguments.get("fsdp")
        own = {"device_id": kwargs.pop("device_id", self.device)}
        taken = arguments_for(wrapper, FullyShardedDataParallel, kwargs, named)
        with contextlib.ExitStack() as stack:
            if self.device.type == "cpu":
                stack.enter_context(contextlib.suppress(LacksArgument))
            taken |= arguments_for(wrapper, FullyShardedDataParallel, own, named)
        return wrapper(module, **taken)

    def fully_shard(self, module: Any, **kwargs: Any) -> Any:
        """The module, or the list of modules, that the target's fully_shard was applied to.

        Raises LacksArgument as `ddp` does.
        """
        from torch.distributed.fsdp import fully_shard  # takes most of a second

        function = resolve(self.target.fully_shard)
        named = self.target.arguments.get("fully_shard")
        return function(module, **arguments_for(function, fully_shard, kwargs, named))

    def flight_recording(self, *asked: bool, as_json: bool = False) -> Any:
        """What the target's flight recorder holds in this process.

        asked: whether to include calls and their stack traces, and to leave out what has ended. As
            JSON there are never stack traces, and no argument for them.
        """
        name = self.target.flight_recorder
        if as_json:
            return json.loads(resolve(f"{name}_json")(*asked))
        return pickle.loads(resolve(name)(*asked))

    def shared_store(self, folder: str, timeout: timedelta) -> Any:
        """A new store of the target, which all ranks of the world share. Each rank calls this.

        folder: empty, and of no other store.
        timeout: of the store's calls.
        """
        make = resolve(self.target.store)
        meeting = dist.PrefixStore(f"for the store in {folder}", self.store)
        return make(
            rank=self.rank,
            world_size=self.world_size,
            host=self.host,
            meeting=meeting,
            folder=folder,
            timeout=timeout,
        )

    def sync_batchnorm(self) -> Any:
        """The target's SyncBatchNorm class."""
        return resolve(self.target.sync_batchnorm)
