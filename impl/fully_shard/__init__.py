"""Fully sharded data parallelism by parameters (FSDP2), as a text to read.

    mesh         which ranks divide parameters, and which hold copies
    layout       what a parameter is for the rest of the program
    parameter    one parameter: its shard, and the whole of it while it is needed
    memory       the memory of a unit's whole parameters, which comes and goes
    comm         how collectives allocate and run; users may bring their own
    collectives  the all-gather, reduce-scatter and all-reduce of many parameters at once
    shared       streams, and what is in flight on them
    unit         parameters that travel together, through one training step
    state        the hooks that drive units through forward and backward
    build        which parameters one call takes
    module       the methods that users call on a sharded module
    api          `fully_shard`

Idea: each rank keeps a part of every parameter, and of its gradient and optimizer state. Before a
layer computes, an all-gather makes its parameters whole; afterwards they are freed. In backward the
same happens once more, and a reduce-scatter leaves each rank its part of the averaged gradient.
Parts are DTensors, so optimizers, norms and checkpoints work on them as on any tensor.

Read `parameter`, then `collectives`, `unit` and `state`.
"""

from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    UnshardHandle,
)

from impl.fully_shard.api import fully_shard
from impl.fully_shard.module import (
    FSDPModule,
    recorded_schedule,
    register_fsdp_forward_method,
    share_comm_ctx,
)

__all__ = [
    "CPUOffloadPolicy",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "recorded_schedule",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
