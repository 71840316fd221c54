"""Mutants of conformance/spec/dtensor/meshes.py."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import Shard

from tests.mutants.dtensor.kit import (
    FrontMutant,
    OperatorMutant,
    TensorMutant,
    with_other_gradient,
)
from tests.mutants.kit import breaks
from tests.mutants.replacing import MethodMutant


@breaks("dtensor/meshes/distribute", says="local: ")
class CutsOtherRowsInAPlane(FrontMutant):
    @staticmethod
    def distribute_tensor(right: Any, x: Any, mesh: Any, layout: Any, **how: Any) -> Any:
        return right(x.flip(0) if mesh.ndim == 2 else x, mesh, layout, **how)


@breaks("dtensor/meshes/full", says="elements differ")
class AddsTwiceAlongTheSecondDimension(TensorMutant):
    @staticmethod
    def full_tensor(right: Any, self: Any, **how: Any) -> Any:
        found = right(self, **how)
        return found * 2 if self.placements[-1].is_partial() else found


@breaks("dtensor/meshes/lines-of-ranks", says="elements differ")
class OtherLinesHaveZeros(FrontMutant):
    @staticmethod
    def distribute_tensor(right: Any, x: Any, mesh: Any, *rest: Any, **how: Any) -> Any:
        return right(x * (0 if mesh.mesh.min() else 1), mesh, *rest, **how)


@breaks("dtensor/meshes/strided", says="whole: ")
class JoinsStridedRowsAsTheyLie(TensorMutant):
    @staticmethod
    def full_tensor(right: Any, self: Any, **how: Any) -> Any:
        strided = not self.placements[0].is_shard() or type(self.placements[0]) is not Shard
        found = right(self, **how)
        return found.roll(1, 0) if strided else found


@breaks("dtensor/meshes/any-redistribution", says=r"sum.*local: ")
class LosesSums(TensorMutant):
    @staticmethod
    def redistribute(right: Any, self: Any, **how: Any) -> Any:
        found = right(self, **how)
        return found * 0 if any(p.is_partial() for p in self.placements) else found


@breaks("dtensor/meshes/any-redistribution", says="gradient: ")
class DoublesGradientsOfShards(TensorMutant):
    @staticmethod
    def redistribute(right: Any, self: Any, **how: Any) -> Any:
        found = right(self, **how)
        cut = any(p.is_shard() for p in self.placements) and self.requires_grad
        return with_other_gradient(found, 2) if cut else found


@breaks("dtensor/meshes/any-program", says="too far off")
class AddsOneInOperators(OperatorMutant):
    ops = ("mm", "relu", "mul.Tensor", "sub.Tensor", "add.Tensor", "cat", "slice.Tensor", "t")


@breaks("dtensor/random/replicas", says="uniform_, ")
class EachRankHasNumbersOfItsOwn(OperatorMutant):
    ops = ("uniform_", "normal_")


@breaks("dtensor/random/repeated", says="whether numbers came again: ")
class TakesAllSeedsForOne(MethodMutant):
    of = "torch"

    @staticmethod
    def manual_seed(right: Any, seed: int) -> Any:
        return right(0)


@breaks("dtensor/random/shards", says="different numbers: got 12, want 24")
@breaks("dtensor/random/factories", says="raised AssertionError")
class HasTorchsFaults(OperatorMutant):
    ops = ()
