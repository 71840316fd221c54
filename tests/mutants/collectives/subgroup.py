"""Mutants of conformance/spec/collectives/subgroup.py."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from tests.mutants.kit import ForwardingGroup, breaks


@breaks("all_reduce/subgroup", says=r"rank 1 is wrong")
class ReducesTwiceInSubgroups(ForwardingGroup):
    """A group whose ranks are not those of the world adds the result to itself."""

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        work = super().allreduce(tensors, opts)
        work.wait()
        if dist.get_rank() != self.rank():
            tensors[0].mul_(2)
        return work


@breaks("broadcast/subgroup", says=r"is wrong")
class TakesGlobalRootsForGroupRanks(ForwardingGroup):
    """In a group, the leader is elected by its group rank and looked for by its global one."""

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        if dist.get_rank() != self.rank():
            opts.rootRank = (opts.rootRank + 1) % self.size()
        return super().broadcast(tensors, opts)


@breaks("all_gather/subgroup", says=r"rank 1 is wrong\nat \[0\]")
@breaks("all_gather_into_tensor/subgroup", says=r"rank 1 is wrong")
@breaks("gather/subgroup", says=r"rank 1 is wrong\nat \[0\]")
@breaks("reduce/subgroup", says=r"rank 1 is wrong")
@breaks("reduce_scatter/subgroup", says=r"rank 1 is wrong")
@breaks("reduce_scatter_tensor/subgroup", says=r"rank 1 is wrong")
@breaks("scatter/subgroup", says=r"rank 1 is wrong")
class CountsMembersFromTheEnd(ForwardingGroup):
    """A group of some ranks has its last member's part first, and reduces to the last one."""

    def in_order(self, parts: Any) -> Any:
        """Of a list, or of a tensor that is made of as many blocks."""
        if self.size() == dist.get_world_size():
            return parts
        if isinstance(parts, Tensor):
            return parts.view(self.size(), -1).flip(0).view(parts.shape)
        return list(reversed(parts))

    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        return super().allgather([self.in_order(one) for one in outputs], inputs, opts)

    def all_gather_single(self, output: Any, tensor: Any, opts: Any) -> Any:
        work = super().all_gather_single(output, tensor, opts)
        work.wait()
        output.copy_(self.in_order(output))
        return work

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        return super().gather([self.in_order(one) for one in outputs], inputs, opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        return super().scatter(outputs, [self.in_order(one) for one in inputs], opts)

    def reduce(self, tensors: Any, opts: Any) -> Any:
        opts.rootRank = self.in_order(range(self.size()))[opts.rootRank]
        return super().reduce(tensors, opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        return super().reduce_scatter(outputs, [self.in_order(one) for one in inputs], opts)

    def reduce_scatter_single(self, output: Any, tensor: Any, opts: Any) -> Any:
        return super().reduce_scatter_single(output, self.in_order(tensor), opts)


@breaks("all_to_all/subgroup", says=r"is wrong")
@breaks("all_to_all_single/subgroup", says=r"is wrong")
class ExchangesByGlobalRanks(ForwardingGroup):
    """In a group, the block of a rank is looked for at its global rank."""

    def alltoall(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        k = self._too_far()
        return super().alltoall(outputs, [*inputs[k:], *inputs[:k]], opts)

    def all_to_all_single(self, output: Any, tensor: Any, out: Any, into: Any, opts: Any) -> Any:
        if not into:
            tensor = tensor.roll(-self._too_far() * (len(tensor) // self.size()), 0)
        return super().all_to_all_single(output, tensor, out, into, opts)

    def _too_far(self) -> int:
        return (dist.get_rank() - self.rank()) % self.size()
