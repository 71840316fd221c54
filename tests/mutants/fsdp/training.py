"""Mutants of conformance/spec/fsdp/training.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from impl.fsdp import collectives
from impl.fsdp.build import groups
from impl.fsdp.flat_param import gradients, handle, views
from impl.fsdp.step import reduction
from tests.mutants.fsdp.kit import Swapped, nothing
from tests.mutants.kit import breaks


@breaks("fsdp/full-shard", says="is wrong")
class GradientsAreSums(Swapped):
    """The division by the world size is missing."""

    swaps = ((collectives, "divide", nothing),)


def _twice(right: Any) -> Any:
    def wrong(device: Any, tensor: Any, factor: float) -> None:
        right(device, tensor, factor)
        right(device, tensor, factor)

    return wrong


@breaks("fsdp/shard-grad-op", says="is wrong")
class DividesTwice(Swapped):
    swaps = ((collectives, "divide", _twice),)


def _own_shard_everywhere(_: Any) -> Any:
    def wrong(device: Any, unsharded: torch.Tensor, shard: torch.Tensor, group: Any) -> None:
        unsharded.view(group.size(), -1).copy_(shard)

    return wrong


@breaks("fsdp/losses", says="loss of forward 1: rank . is wrong")
@breaks("fsdp/eval", says="is wrong")
class GathersItsOwnShardAlone(Swapped):
    swaps = ((collectives, "all_gather", _own_shard_everywhere),)


@breaks("fsdp/no-shard", says="is wrong")
@breaks("fsdp/trace-no-shard", says="the traces part at operation")
@breaks("fsdp/gather-never", says="want all-reduces of")
@breaks("fsdp/unused-replicated-unit", says="is wrong")
@breaks("fsdp/hybrid-shard", says="is wrong")
@breaks("fsdp/trace-hybrid-shard", says="between: the traces part")
class RanksKeepTheirOwnGradients(Swapped):
    swaps = ((collectives, "all_reduce", nothing),)


@breaks("fsdp/hybrid-shard-zero2", says="is wrong")
@breaks("fsdp/with-torch-hybrid", says="is wrong")
class DividesByTheShardingGroupAlone(Swapped):
    """Factors differ between one dimension and two (pytorch#155903)."""

    swaps = ((groups, "divide_factors", lambda right: lambda size: right(max(1, size // 2))),)


@breaks("fsdp/original-parameters", says="is wrong")
@breaks("fsdp/any-model", says="is wrong")
class OriginalParametersGetNoGradients(Swapped):
    swaps = ((gradients, "show_sharded_grads", nothing),)


@breaks("fsdp/adaptive-optimizer", says="is wrong")
class GradientsAreSigns(Swapped):
    """Gradients are replaced by their signs: small ones become as large as others."""

    swaps = (
        (
            collectives,
            "divide",
            lambda right: lambda device, tensor, factor: tensor.sign_().mul_(1e-3),
        ),
    )


def _last_rank_learns_nothing(right: Any) -> Any:
    def wrong(state: Any, handle: Any, shard: torch.Tensor) -> None:
        state.device_handle.flush()
        if handle.rank == handle.world_size - 1:
            shard.zero_()
        right(state, handle, shard)

    return wrong


@breaks("fsdp/tied-weights", says="is wrong")
class TheLastRankNeverUpdates(Swapped):
    """The last rank's shard of the gradient is zero (pytorch#176076)."""

    swaps = ((reduction, "_finish", _last_rank_learns_nothing),)


def _padded_in_front(right: Any) -> Any:
    def wrong(
        device: Any, tensor: torch.Tensor, dtype: Any, padded_numel: int, *group: Any
    ) -> torch.Tensor:
        result: torch.Tensor = right(device, tensor, dtype, padded_numel, *group)
        return result.roll(padded_numel - tensor.numel())

    return wrong


@breaks("fsdp/uneven-sizes", says="is wrong")
@breaks("fsdp/with-torch", says="is wrong")
class PadsInFront(Swapped):
    """The padding comes before the gradient instead of behind it."""

    swaps = ((reduction, "_cast_and_pad", _padded_in_front),)


@breaks("fsdp/frozen-unit", says="is wrong")
class FrozenUnitsAreTrained(Swapped):
    swaps = (
        (
            handle,
            "make_flat_parameter",
            lambda right: lambda data, requires_grad: right(data, requires_grad=True),
        ),
    )


@breaks("fsdp/accumulates", says="is wrong")
@breaks("fsdp/cpu-offload-accumulates", says="is wrong")
class KeepsTheLastGradientAlone(Swapped):
    swaps = ((reduction, "_accumulate", lambda _: lambda device, handle, grad: grad),)


def _and_halve(right: Any, handle: Any) -> None:
    right(handle)
    handle.flat_param.register_hook(lambda grad: grad / 2)


@breaks("fsdp/two-forwards", says="is wrong")
class TakesTheGradientOfOneForward(Swapped):
    """What an earlier run of the hook left is overwritten, and half of each gradient is lost."""

    swaps = (
        (
            gradients,
            "prepare_for_backward",
            lambda right: lambda handle: _and_halve(right, handle),
        ),
    )


def _depth(state: Any) -> int:
    return sum(
        other is not state and any(part is state.wrapper for part in other.wrapper.modules())
        for other in state.shared.states
    )


def _averaged_by_depth(right: Any) -> Any:
    def wrong(state: Any, handle: Any, shard: torch.Tensor) -> None:
        state.device_handle.flush()
        right(state, handle, shard / max(1, _depth(state)))

    return wrong


@breaks("fsdp/nested-units", says="is wrong")
class AveragesAtEachLevel(Swapped):
    """Gradients of units within units come out too small."""

    swaps = ((reduction, "_finish", _averaged_by_depth),)


@breaks("fsdp/frozen-parts", says="is wrong")
class TrainsFrozenParts(Swapped):
    """Original parameters require gradients, whether they did before or not."""

    swaps = ((views, "_as_parameter", lambda _: lambda tensor: nn.Parameter(tensor.detach())),)


def _divided_by_four(right: Any) -> Any:
    def wrong(device: Any, shard: Any, source: Any, group: Any) -> None:
        source.mul_(max(group.size() / 4, 1))
        right(device, shard, source, group)

    return wrong


@breaks("fsdp/uneven-sizes", says="is wrong")
class AveragesShardsOfFourAtMost(Swapped):
    """The sum of the gradients of more than four ranks is divided by four."""

    swaps = ((collectives, "reduce_scatter", _divided_by_four),)
