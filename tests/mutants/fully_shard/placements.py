"""Mutants of conformance/spec/fully_shard/placements.py."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import Replicate, Shard

from impl.fully_shard import api, build, collectives, parameter
from impl.fully_shard.mesh import Division
from impl.fully_shard.module import FSDPModule
from impl.fully_shard.parameter import ShardedParameter
from impl.fully_shard.unit import Unit
from tests.mutants.fsdp.kit import Swapped, nothing
from tests.mutants.fully_shard.kit import everywhere, first, then
from tests.mutants.kit import breaks


def _without_the_last(_: Any, parameters: Any, rows: Any) -> None:
    for each in parameters:
        if len(each.size) and each.size[0] > 2:
            each.gathered[: each.size.numel()].view(each.size)[-1] = 0


@breaks("fully_shard/any-shape", says="whole params")
class LosesTheLastRow(Swapped):
    """Of parameters of more than two rows."""

    swaps = ((collectives, "spread", then(_without_the_last)),)


def _refuses(whole: Any, *args: Any) -> None:
    if not whole.numel():
        raise ValueError("no elements")


@breaks("fully_shard/no-rows", says="raised ValueError")
class RefusesParametersWithoutElements(Swapped):
    swaps = ((parameter, "_checked_dim", first(_refuses)),)


@breaks("fully_shard/other-dimensions", says="shard of params.0")
class DividesRowsAlone(Swapped):
    """Whatever shard_placement_fn says."""

    swaps = ((build, "_placement", lambda _: lambda choose, param: (Shard(0), None)),)


@breaks("fully_shard/replica-placements", says="placements")
class SaysThatReplicasAreShards(Swapped):
    swaps = ((Division, "placements", lambda _: lambda self, shard: (Replicate(), Replicate())),)


@breaks("fully_shard/replica-groups", says="between")
@breaks("fully_shard/replica-sizes", says="elements between replicas")
@breaks("fully_shard/replicas", says="grads of")
@breaks("fully_shard/replicas-of-one-rank", says="grads of")
@breaks("fully_shard/accumulation-over-replicas", says="grads of")
class ReducesWithinReplicasAlone(Swapped):
    """Replicas drift apart."""

    swaps = ((collectives, "add_replicas", nothing),)


def _drops(right: Any) -> Any:
    def wrong(self: Any, row: Any) -> None:
        self._partial = None

    return wrong


@breaks("fully_shard/all-reduce-later", says="gradient of")
class LosesWhatItDoesNotAddUp(Swapped):
    """Gradients that were scattered and not all-reduced are gone."""

    swaps = ((Unit, "_add_partial", _drops),)


@breaks("fully_shard/all-reduce-of-one-unit", says="all-reduces of two blocks")
class AddsUpAllUnitsAlike(Swapped):
    """recurse=False has no effect."""

    swaps = ((FSDPModule, "set_requires_all_reduce", everywhere),)


def _scaled(self: Any, shard: Any) -> None:
    shard.mul_(3)


@breaks("fully_shard/gradient-norm", says="norm: got")
class TriplesGradients(Swapped):
    swaps = ((ShardedParameter, "put_gradient", first(_scaled)),)


@breaks("fully_shard/clipped-gradients", says="norm: got|clipped")
class SaysThatGradientsAreReplicas(Swapped):
    """So each rank's norm is that of its own part."""

    swaps = ((Division, "placements", lambda _: lambda self, shard: (Replicate(),)),)


_kept: list[Any] = []


def _keep(_: Any, *args: Any) -> None:
    _kept.append(args[0])


@breaks("fully_shard/freed-with-the-model", says="is still there")
class HoldsModels(Swapped):
    swaps = ((api, "managed_modules", then(_keep)),)


def _whole(right: Any) -> Any:
    def wrong(self: Any, local: Any) -> Any:
        padded = right(self, local)
        large = padded.new_empty(4 * padded.numel() + 4)
        large[: padded.numel()] = padded
        return large[: padded.numel()]

    return wrong


@breaks("fully_shard/memory-of-shards", says="bytes")
class KeepsTheMemoryOfTheWhole(Swapped):
    """Shards are views of memory that is larger than they are."""

    swaps = ((ShardedParameter, "_padded", _whole),)


_shared: list[Any] = []


def _the_first_ones(right: Any) -> Any:
    def wrong(self: Any) -> None:
        if _shared and _shared[0] is not self:
            for each in self.parameters:
                each.forget_gradient()
        _shared[:] = [self]
        right(self)

    return wrong


@breaks("fully_shard/two-models", says="gradient of")
@breaks("fully_shard/several-roots", says="gradient of|raised")
class ReducesTheUnitBeforeAlone(Swapped):
    """A unit's gradients are lost unless the last unit that reduced was itself."""

    swaps = ((Unit, "end_backward", _the_first_ones),)


def _averaging_over_replicas(right: Any) -> Any:
    def wrong(division: Any, dtype: Any, factor: Any, only_sums: bool) -> Any:
        ignored = division.replica_group is not None
        return right(division, dtype, None if ignored else factor, only_sums)

    return wrong


@breaks("fully_shard/divide-factor-over-replicas", says="gradient of .* is not 0.5 times the mean")
class IgnoresTheFactorOverReplicas(Swapped):
    """Where there are replicas, the sum is always divided by the number of ranks."""

    swaps = ((collectives, "averaging", _averaging_over_replicas),)


def _hooking_first(right: Any) -> Any:
    def wrong(self: Any, parameters: Any, row: Any, how: Any) -> None:
        hook, self.all_reduce_hook = self.all_reduce_hook, None
        if hook is not None:
            self._device.flush()
            hook(row)
        right(self, parameters, row, how)
        self.all_reduce_hook = hook

    return wrong


@breaks("fully_shard/hook-over-replicas", says=r"is not 4 times the mean of all ranks, plus 1\.0")
class RunsHooksBeforeTheSumOverReplicas(Swapped):
    """A hook gets the gradients of one replica."""

    swaps = ((Unit, "_after_scatter", _hooking_first),)
