"""The settings of a flat parameter: strategy, device, precision. They never change."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

from impl.fsdp.common import KEEP_AFTER_FORWARD_STRATEGIES, RESHARD_AFTER_FORWARD_STRATEGIES


@dataclass(frozen=True)
class HandleConfig:
    """The settings of a unit that concern its flat parameter.

    Attributes:
        strategy: `NO_SHARD` if the sharding group has one rank, whatever the user asked for.
        device: where computation and communication take place.
    """

    strategy: ShardingStrategy
    device: torch.device
    offload_params: bool
    mixed_precision: MixedPrecision
    use_orig_params: bool

    @property
    def uses_sharding(self) -> bool:
        return self.strategy != ShardingStrategy.NO_SHARD

    @property
    def reshards_after_forward(self) -> bool:
        return self.strategy in RESHARD_AFTER_FORWARD_STRATEGIES

    @property
    def keeps_after_forward(self) -> bool:
        return self.strategy in KEEP_AFTER_FORWARD_STRATEGIES

    @property
    def keeps_low_precision_grads(self) -> bool:
        return self.mixed_precision.keep_low_precision_grads


@dataclass(frozen=True)
class Dtypes:
    """The dtypes of a handle: of the shard, of computation, and of gradient reduction."""

    original: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype

    @staticmethod
    def of(original: torch.dtype, mixed_precision: MixedPrecision) -> Dtypes:
        """`reduce_dtype` follows `param_dtype` unless it is given; both follow the parameters'."""
        compute = mixed_precision.param_dtype or original
        return Dtypes(original, compute, mixed_precision.reduce_dtype or compute)
