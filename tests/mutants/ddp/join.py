"""DDP whose ranks that have run out of input do not do what the others need."""

from __future__ import annotations

import torch.distributed as dist

from impl.ddp.iteration.reducer import Reducer
from impl.ddp.wrapper.api import DistributedDataParallel
from impl.ddp.wrapper.buffer_sync import BufferSync
from impl.ddp.wrapper.join import DDPJoinHook
from tests.mutants.ddp.kit import DDPFault, afterwards, instead, swap
from tests.mutants.kit import breaks


@breaks("ddp/join/buffers", says=r"forward 3 began with the buffer of 0\.0, not one of \[1\]")
class BuffersAreAlwaysRank0s(DDPFault):
    """Rank 0's buffers count, though it has no input any more."""

    patched = instead(
        DistributedDataParallel, "_authoritative_buffer_rank", lambda self, *, has_input: 0
    )


@breaks("ddp/join/buffer-hook", says="ranks disagree on op|calls of the hook")
class JoinedRanksHaveNoBufferHook(DDPFault):
    patched = swap(
        BufferSync,
        "_check_and_sync_module_buffers",
        lambda right: lambda self: None if hasattr(self, "buffer_hook") else right(self),
    )


@breaks("ddp/join/afterwards", says="ranks disagree|gradients after join")
class JoinedForGood(DDPFault):
    """A rank that ran out of input early averages no gradients any more."""

    patched = afterwards(
        DDPJoinHook,
        "post_hook",
        lambda self, is_last: setattr(self._ddp, "require_backward_grad_sync", is_last),
    )


@breaks("ddp/join/group", says="invalid root")
class TakesItsRankInTheWorld(DDPFault):
    patched = swap(
        DistributedDataParallel,
        "_distributed_rank",
        lambda right: property(lambda self: dist.get_rank()),
    )


@breaks("ddp/join/unused-by-those-who-are-left", says="which have a gradient: .*, want")
class JoinedRanksRepeatTheirMap(DDPFault):
    """A joined rank contributes what was used in the step before."""

    patched = instead(Reducer, "_get_empty_used_map", lambda self: self._used_map().on_device)
