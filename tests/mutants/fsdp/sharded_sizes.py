"""Mutants of conformance/spec/fsdp/sharded_sizes.py."""

from __future__ import annotations

import contextlib

from torch.distributed.fsdp import ShardingStrategy

from impl.fsdp import api
from impl.fsdp.build import construct as build
from tests.mutants.fsdp.kit import Swapped, always
from tests.mutants.kit import breaks


@breaks("fsdp/sharded-parameters", says=r"got Held\(params=284")
@breaks("fsdp/sharded-gradients", says="grads=284")
@breaks("fsdp/sharded-optimizer-state", says="state=284")
class EveryRankHoldsTheModel(Swapped):
    """All strategies are NO_SHARD."""

    swaps = ((build, "resolve_strategy", always(ShardingStrategy.NO_SHARD)),)


@breaks("fsdp/whole-gradients-under-no-sync", says="elements of gradients")
class NoSyncShardsGradients(Swapped):
    swaps = (
        (
            api.FullyShardedDataParallel,
            "no_sync",
            lambda _: lambda self: contextlib.nullcontext(),
        ),
    )
