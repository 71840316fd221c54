"""Mutants of conformance/spec/fsdp/traces.py."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import BackwardPrefetch

from impl.fsdp import api, collectives
from impl.fsdp.build import construct as build
from impl.fsdp.flat_param import layout
from impl.fsdp.phases import GradientEvent
from impl.fsdp.step import backward, forward, order, reduction, sharding
from impl.torch_private import all_gather_single
from tests.mutants.fsdp.kit import FREES, KEEPS, Swapped, always, nothing
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
class FirstRankSendsAnExtraMessage(Swapped):
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
class IssuesAnExtraAllReduceForEachUnit(Swapped):
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


@breaks("fsdp/trace-full-shard", says="the traces part at operation")
@breaks("fsdp/trace-checkpointed", says="the traces part at operation")
class GathersOnceInFullShard(Swapped):
    swaps = (KEEPS,)


@breaks("fsdp/trace-shard-grad-op", says="the traces part at operation")
@breaks("fsdp/gather-once", says="the backward gathers")
class GathersAgainInTheBackward(Swapped):
    swaps = (FREES,)


@breaks("fsdp/trace-prefetch", says="the traces part at operation")
@breaks("fsdp/prefetch-before", says="gathers after each gradient")
class NeverPrefetches(Swapped):
    swaps = ((sharding, "unit_to_prefetch", always(None)),)


@breaks("fsdp/forward-prefetch", says="gathers before each forward")
class DoesNotPrefetchInTheForward(Swapped):
    swaps = ((order.ExecutionOrder, "after_in_forward", always(None)),)


def _early(right: Any) -> Any:
    def wrong(order: Any, unit: int, state: Any, backward: Any, forward: bool) -> Any:
        return right(order, unit, state, BackwardPrefetch.BACKWARD_PRE, forward)

    return wrong


@breaks("fsdp/prefetch-after", says="gathers after each gradient")
@breaks("fsdp/no-prefetch", says="gathers after each gradient")
class PrefetchesBeforeWhenAskedForAfter(Swapped):
    swaps = ((sharding, "unit_to_prefetch", _early),)


def _reduce(state: Any, handle: Any) -> None:
    handle.gradient_progress.on(GradientEvent.REDUCED)
    reduction.reduce_gradient(state, handle)


@breaks("fsdp/trace-accumulation", says="the traces part at operation")
class ReducesUnderNoSync(Swapped):
    swaps = (
        (
            backward,
            "_reduce_or_keep",
            lambda _: lambda state, handle: _reduce(state, handle),
        ),
    )


@breaks("fsdp/gather-sizes", says="the forward gathers")
class PadsEveryChunk(Swapped):
    """Each rank's chunk has one element more than is needed."""

    swaps = ((layout, "chunk_numel", lambda right: lambda *args: right(*args) + 1),)


def _after_meeting(right: Any, state: Any, *args: Any) -> Any:
    dist.barrier(state.process_group)
    return right(state, *args)


@breaks("fsdp/silent-construction", says="construction: the traces part")
class CommunicatesInTheConstructor(Swapped):
    swaps = (
        (
            build,
            "_make_handle",
            lambda right: lambda state, *args: _after_meeting(right, state, *args),
        ),
    )


@breaks("fsdp/ranks-that-differ", says="said nothing|waited|raised")
class DoesNotCompareUnits(Swapped):
    """Ranks compute with each other's units (pytorch#170667)."""

    swaps = ((forward, "_check_same_unit_on_all_ranks", nothing),)


@breaks("fsdp/order-that-changes", says="iterations that warn")
class SaysNothingOfAnotherOrder(Swapped):
    swaps = ((order.ExecutionOrder, "check_forward", always(None)),)


@breaks("fsdp/silent-no-sync", says="under no_sync: reduce_scatter")
@breaks("fsdp/no-sync-of-inner-unit", says="was to raise")
class NoSyncIsIgnored(Swapped):
    swaps = (
        (
            api.FullyShardedDataParallel,
            "no_sync",
            lambda _: lambda self: contextlib.nullcontext(),
        ),
    )
