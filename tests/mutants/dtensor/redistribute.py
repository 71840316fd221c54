"""Mutants of conformance/spec/dtensor/redistribute.py."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import Replicate, Shard

from tests.mutants.dtensor.kit import TensorMutant, with_other_gradient
from tests.mutants.kit import breaks


@breaks("dtensor/redistribute/replicas-to-shards", says="local: ")
@breaks("dtensor/redistribute/uneven", says="local: ")
@breaks("dtensor/redistribute/transposed", says="local: ")
class CutsAnotherTensor(TensorMutant):
    @staticmethod
    def redistribute(right: Any, self: Any, *, placements: Any, **how: Any) -> Any:
        found = right(self, placements=placements, **how)
        return (
            found + 1 if placements[0].is_shard() and self.placements[0].is_replicate() else found
        )


@breaks("dtensor/redistribute/shards-to-replicas", says="local: ")
@breaks("dtensor/redistribute/integers", says="local: ")
@breaks("dtensor/redistribute/bfloat16", says="local: ")
class GathersShardsInReverse(TensorMutant):
    @staticmethod
    def redistribute(right: Any, self: Any, *, placements: Any, **how: Any) -> Any:
        found = right(self, placements=placements, **how)
        turns = self.placements[0].is_shard() and placements[0].is_replicate()
        return found.flip(self.placements[0].dim) if turns else found


@breaks("dtensor/redistribute/shards-to-shards", says="local: ")
@breaks("dtensor/redistribute/asynchronous", says="local: ")
class ExchangesNothing(TensorMutant):
    @staticmethod
    def redistribute(right: Any, self: Any, *, placements: Any, **how: Any) -> Any:
        found = right(self, placements=placements, **how)
        exchanged = self.placements[0].is_shard() and placements[0].is_shard()
        return found * 0 if exchanged and self.placements != found.placements else found


@breaks("dtensor/redistribute/empty-shards", says="local: ")
class LosesWhatOneRankHas(TensorMutant):
    @staticmethod
    def redistribute(right: Any, self: Any, *, placements: Any, **how: Any) -> Any:
        found = right(self, placements=placements, **how)
        return found * 0 if 1 in self.shape else found


@breaks("dtensor/redistribute/sums-to-replicas", says="local: ")
@breaks("dtensor/redistribute/sums-to-shards", says="local: ")
@breaks("dtensor/redistribute/averages", says="local: ")
@breaks("dtensor/redistribute/extremes", says="local: ")
class KeepsItsOwnShare(TensorMutant):
    @staticmethod
    def redistribute(right: Any, self: Any, *, placements: Any, **how: Any) -> Any:
        if not self.placements[0].is_partial() or placements[0].is_partial():
            return right(self, placements=placements, **how)
        mine = type(self).from_local(self.to_local(), self.device_mesh, [Replicate()])
        return right(mine, placements=placements, **how)


@breaks("dtensor/redistribute/original", says="local: |sum: ")
class WritesToTheOriginal(TensorMutant):
    @staticmethod
    def redistribute(right: Any, self: Any, **how: Any) -> Any:
        found = right(self, **how)
        self._local_tensor.detach().add_(1)
        return found


@breaks("dtensor/redistribute/gradients-of-shards", says="elements differ")
@breaks("dtensor/redistribute/gradients-of-sums", says="elements differ")
class DoublesGradients(TensorMutant):
    @staticmethod
    def redistribute(right: Any, self: Any, **how: Any) -> Any:
        return with_other_gradient(right(self, **how), 2)


@breaks("dtensor/redistribute/no-communication", says="got [1-9].*, want 0")
class AsksAllRanks(TensorMutant):
    @staticmethod
    def redistribute(right: Any, self: Any, *, placements: Any, **how: Any) -> Any:
        found = right(self, placements=placements, **how)
        if found.placements[0].is_shard():
            right(found, placements=[Replicate()])
        return found


@breaks("dtensor/redistribute/one-collective", says="got 2, want 1")
class GathersInTwoSteps(TensorMutant):
    @staticmethod
    def redistribute(right: Any, self: Any, *, placements: Any, **how: Any) -> Any:
        if self.placements[0] == Shard(0) and placements[0].is_replicate():
            self = right(self, placements=[Shard(1)])
        return right(self, placements=placements, **how)
