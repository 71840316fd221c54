"""Fully sharded data parallel training: torch's `FullyShardedDataParallel`, readable.

Each rank keeps a chunk of the parameters, of their gradients and of the optimizer's state. A unit's
parameters are gathered just before its forward and backward and freed afterwards; its gradient is
reduced and scattered while the backward of the next unit runs.

Reading order (each file imports only from those above it):

    common, device, layout      words; streams; arithmetic of the flat parameter
    flat_param, views, tensor_parallel
                                what is in it; what the user's modules show
    collectives, config, versions, handle
                                one flat parameter: sharded, gathered, freed
    gradients, writeback        where its gradient is; what if the user replaces things
    order, limiter, state       which unit comes next; what instances know
    sharding, reduction         gather, free, prefetch; average gradients
    tree, buffers, lazy_init, backward, forward
                                the hooks of a training step
    groups, ignored, materialize, wrapping, build
                                the constructor
    unshard_params, grad_norm, sharded_values, state_dict_type, state_dict
    optim_names, optim_save, optim_load, optim_api
                                outside of training steps
    api                         FullyShardedDataParallel

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
