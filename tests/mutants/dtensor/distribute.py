"""Mutants of conformance/spec/dtensor/distribute.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from tests.mutants.dtensor.kit import (
    FRONT,
    FrontMutant,
    ShardMutant,
    TensorMutant,
    with_other_gradient,
)
from tests.mutants.kit import breaks
from tests.mutants.replacing import MethodMutant


@breaks("dtensor/distribute/shards", says="local: ")
@breaks("dtensor/distribute/uneven", says="local: ")
@breaks("dtensor/distribute/strides", says="local: ")
@breaks("dtensor/distribute/dtypes", says="local: ")
class HandsOutRowsInReverse(ShardMutant):
    @staticmethod
    def _shard_tensor(right: Any, self: Any, tensor: Any, *rest: Any) -> Any:
        return right(self, tensor.flip(self.dim), *rest)


@breaks("dtensor/distribute/empty-shards", says="local: got")
class EmptyShardsHaveNoSizes(ShardMutant):
    @staticmethod
    def _shard_tensor(right: Any, self: Any, tensor: Any, *rest: Any) -> Any:
        found = right(self, tensor, *rest)
        return found if found.numel() else found.new_empty([0] * found.ndim)


@breaks("dtensor/distribute/replicas", says="local: ")
class ReplicatesZeros(FrontMutant):
    @staticmethod
    def distribute_tensor(right: Any, *args: Any, **how: Any) -> Any:
        found = right(*args, **how)
        return found * 0 if found.placements[0] == Replicate() else found


@breaks("dtensor/distribute/first-rank", says="local: ")
class EachRankKeepsItsOwnData(FrontMutant):
    @staticmethod
    def distribute_tensor(right: Any, *args: Any, **how: Any) -> Any:
        return right(*args, **{"src_data_rank": None, **how})


@breaks("dtensor/distribute/source-rank", says="local: ")
@breaks("dtensor/distribute/own-data", says="local: ")
class AlwaysTakesTheFirstRanksData(FrontMutant):
    @staticmethod
    def distribute_tensor(right: Any, *args: Any, **_: Any) -> Any:
        return right(*args)


@breaks("dtensor/distribute/metadata", says="size, stride: ")
class TurnsStrides(MethodMutant):
    of = f"{FRONT}._api"

    @staticmethod
    def TensorMeta(right: Any, shape: Any, stride: Any, dtype: Any) -> Any:  # noqa: N802
        return right(shape, tuple(reversed(stride)), dtype)


@breaks("dtensor/distribute/leaves", says="leaf: ")
class MakesNoLeaves(FrontMutant):
    @staticmethod
    def distribute_tensor(right: Any, *args: Any, **how: Any) -> Any:
        return right(*args, **how) * 1


@breaks("dtensor/distribute/refusals", says="nothing was raised")
class ReplicatesWhatItCannotDo(FrontMutant):
    @staticmethod
    def distribute_tensor(right: Any, tensor: Any, mesh: Any, *args: Any, **how: Any) -> Any:
        try:
            return right(tensor, mesh, *args, **how)
        except Exception:
            return tensor if isinstance(tensor, DTensor) else right(tensor, mesh)


@breaks("dtensor/local/memory", says="from_local: ")
class CopiesLocalTensors(TensorMutant):
    @staticmethod
    def from_local(right: Any, local: Any, *args: Any, **how: Any) -> Any:
        return right(local.clone(), *args, **how)


@breaks("dtensor/local/even-shards", says="local: ")
@breaks("dtensor/local/uneven-shards", says="elements differ")
class DoublesLocalTensors(TensorMutant):
    @staticmethod
    def from_local(right: Any, local: Any, *args: Any, **how: Any) -> Any:
        return right(local * (1 + dist.get_rank()), *args, **how)


@breaks("dtensor/local/uneven-shards", says=r"stride: .*got 3, want 1|stride: ")
class TakesAllTensorsForContiguous(TensorMutant):
    @staticmethod
    def from_local(right: Any, local: Any, *args: Any, **how: Any) -> Any:
        if "stride" in how:
            how["stride"] = torch.empty(how["shape"], device="meta").stride()
        return right(local, *args, **how)


@breaks("dtensor/local/checked", says="values: ")
class ChecksNothing(TensorMutant):
    @staticmethod
    def from_local(right: Any, *args: Any, **how: Any) -> Any:
        return right(*args, **{**how, "run_check": False})


@breaks("dtensor/local/gradients", says="elements differ")
class DoublesGradientsOfWholeTensors(TensorMutant):
    @staticmethod
    def full_tensor(right: Any, self: Any, **how: Any) -> Any:
        return with_other_gradient(right(self, **how), 2)


@breaks("dtensor/local/summed-gradients", says="gradient: ")
class AveragesGradientsOfShares(TensorMutant):
    @staticmethod
    def from_local(right: Any, local: Any, mesh: Any, *args: Any, **how: Any) -> Any:
        return right(with_other_gradient(local, 1 / mesh.size()), mesh, *args, **how)


@breaks("dtensor/local/grad-placements", says="gradient: ")
class ForgetsGradPlacements(TensorMutant):
    @staticmethod
    def to_local(right: Any, self: Any, **_: Any) -> Any:
        return right(self)


@breaks("dtensor/local/own-gradient", says="gradient: ")
class ForgetsPlacementsOfLocalGradients(TensorMutant):
    @staticmethod
    def from_local(right: Any, *args: Any, **how: Any) -> Any:
        return right(*args, **{**how, "grad_placements": None})


@breaks("dtensor/full/shards", says="elements differ")
@breaks("dtensor/full/sums", says="elements differ")
@breaks("dtensor/full/averages", says="elements differ")
@breaks("dtensor/full/extremes", says="elements differ")
class LosesTheLastElement(TensorMutant):
    @staticmethod
    def full_tensor(right: Any, self: Any, **how: Any) -> Any:
        found = right(self, **how).clone()
        found.view(-1)[-1:] = 9
        return found
