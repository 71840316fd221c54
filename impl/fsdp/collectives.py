"""All-gather, reduce-scatter and all-reduce of a training step, and division of gradients.

Each puts its collective on the current stream of `device`; the result is there for code that waits
for that stream.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from impl.device import DeviceHandle
from impl.torch_private import all_gather_single, backend_memory, reduce_scatter_single


def new_input(
    like: torch.Tensor, numel: int, group: dist.ProcessGroup, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """(numel,): uninitialised, from which `group` will communicate; on the device of `like`.

    On the CPU it is the group's own memory, if it has some: that storage cannot be resized.
    """
    dtype = like.dtype if dtype is None else dtype
    own = backend_memory(group, numel, dtype, like.device) if like.device.type == "cpu" else None
    return like.new_empty(numel, dtype=dtype) if own is None else own


@dataclass(frozen=True)
class DivideFactors:
    """Averaging in two steps: divide before the sum and after it.

    Dividing by the world size only before the sum loses small values in half precision, only after
    it overflows; about the square root on either side does neither. `before * after` is the number
    of ranks.
    """

    before: float
    after: float


def divide_factors(world_size: int) -> DivideFactors:
    """torch's factors: `before` is a power of two, about the square root of `world_size`."""
    before = 1
    while world_size % before == 0 and world_size / before > before:
        before *= 2
    return DivideFactors(float(before), world_size / before)


def divide(device: DeviceHandle, tensor: torch.Tensor, factor: float) -> None:
    if factor > 1:
        device.enqueue(lambda: tensor.div_(factor), reads=(tensor,), writes=(tensor,))


def all_gather(
    device: DeviceHandle, unsharded: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup
) -> None:
    """Fill `unsharded`, (world_size * chunk_numel,), with every rank's `shard`, (chunk_numel,)."""
    device.start_collective(
        lambda async_op: all_gather_single(unsharded, shard, group, async_op),
        reads=(shard,),
        writes=(unsharded,),
    )


def reduce_scatter(
    device: DeviceHandle, shard: torch.Tensor, unsharded: torch.Tensor, group: dist.ProcessGroup
) -> None:
    """Sum `unsharded` over the ranks and leave this rank's chunk of the sum in `shard`."""
    device.start_collective(
        lambda async_op: reduce_scatter_single(shard, unsharded, group, async_op),
        reads=(unsharded,),
        writes=(shard,),
    )


def all_reduce(device: DeviceHandle, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    device.start_collective(
        lambda async_op: dist.all_reduce(tensor, group=group, async_op=async_op),
        reads=(tensor,),
        writes=(tensor,),
    )
