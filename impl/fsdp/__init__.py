"""Fully sharded data parallel training: torch's `FullyShardedDataParallel`, readable.

Each rank keeps a chunk of the parameters, of their gradients and of the optimizer's state. A unit's
parameters are gathered just before its forward and backward and freed afterwards; its gradient is
reduced and scattered while the backward of the next unit runs.

Reading order (each imports only from those above it):

    common, phases                words; where a unit is, and what may come next
    collectives                   the collectives of a step
    flat_param/                   one flat parameter: sharded, gathered, freed
    step/                         the hooks of a training step; step.order: which unit comes early
    build/                        the constructor
    checkpoint/                   state dicts of models and optimizers
    api                           FullyShardedDataParallel

torch's configuration classes, enums and wrap policies are used as they are; they are re-exported
here so that one import changes.
"""

from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

from impl.fsdp.api import FullyShardedDataParallel

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
]
