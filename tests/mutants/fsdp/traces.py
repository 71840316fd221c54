"""Faults of what FSDP exchanges: too much, too often, or not the same on all ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from impl.fsdp import api, collectives
from impl.fsdp.step import backward, reduction
from impl.torch_private import all_gather_single
from tests.mutants.fsdp.kit import Swapped
from tests.mutants.kit import breaks


def _in_two_parts(right: Any) -> Any:
    def wrong(device: Any, shard: torch.Tensor, unsharded: torch.Tensor, group: Any) -> None:
        columns = unsharded.view(group.size(), -1)
        for part in range(2):
            half = shard[part::2].clone()
            right(device, half, columns[:, part::2].reshape(-1), group)
            device.flush()
            shard[part::2] = half

    return wrong


@breaks("fsdp/scatter-sizes", says="the backward scatters")
class ReducesInTwoParts(Swapped):
    swaps = ((collectives, "reduce_scatter", _in_two_parts),)


def _telling(right: Any) -> Any:
    def wrong(context: Any) -> None:
        right(context)
        group = context.root.process_group
        last = group.size() - 1
        if group.rank() == 0:
            dist.send(torch.zeros(1), dist.get_global_rank(group, last), group)
        elif group.rank() == last:
            dist.recv(torch.zeros(1), dist.get_global_rank(group, 0), group)

    return wrong


@breaks("fsdp/same-calls", says="got 'recv', want 'send'")
class TheFirstRankTellsTheLast(Swapped):
    """After a backward the first rank sends the last one a number."""

    swaps = ((backward, "_end_of_backward", _telling),)


def _alone_in_the_second(right: Any) -> Any:
    def wrong(state: Any, handle: Any, shard: torch.Tensor) -> None:
        if state.inter_node_group is not None:
            extra = shard.new_zeros(1)
            dist.all_reduce(extra, group=state.inter_node_group)
        right(state, handle, shard)

    return wrong


@breaks("fsdp/hybrid-collectives", says=r"between: the traces part")
class CountsReplicasEachTime(Swapped):
    """One more all-reduce of one element a unit."""

    swaps = ((reduction, "_finish", _alone_in_the_second),)


def _of_whole_gradients(right: Any) -> Any:
    def wrong(state: Any, max_norm: float, norm_type: float) -> Any:
        for handle in state.shared.units:
            grad = handle.flat_param.grad
            whole = grad.new_empty(grad.numel() * handle.world_size)
            all_gather_single(whole, grad, handle.process_group, False)
        return right(state, max_norm, norm_type)

    return wrong


@breaks("fsdp/norm-is-small", says=r"issued all_gather float32\[\d\d")
class GathersGradientsForTheirNorm(Swapped):
    swaps = ((api, "clip_grad_norm", _of_whole_gradients),)
