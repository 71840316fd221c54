"""Mutants of conformance/spec/collectives/coalesced.py."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from conformance.power.handles import Done
from tests.mutants.kit import ForwardingGroup, breaks
from tests.mutants.replacing import Replacing


def _before_the_first_empty(tensors: Any) -> int:
    return next((i for i, x in enumerate(tensors) if x.numel() == 0), len(tensors))


@breaks("all_reduce_coalesced/empty-members", says=r"rank 0 is wrong\nat \[1\]")
@breaks("all_gather_coalesced/empty-members", says=r"rank 0 is wrong\nat \[0\]\[1\]")
class StopsAtAnEmptyTensor(ForwardingGroup):
    """Tensors after one without elements are left out."""

    def allreduce_coalesced(self, tensors: Any, opts: Any) -> Any:
        end = _before_the_first_empty(tensors)
        return super().allreduce_coalesced(tensors[:end], opts) if end else Done()

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        end = _before_the_first_empty(inputs)
        shorter = [one[:end] for one in outputs]
        return super().allgather_coalesced(shorter, inputs[:end], opts) if end else Done()


@breaks("all_reduce_coalesced/strided", says=r"rank 0 is wrong\nat \[0\]")
class ReducesCopiesOfSeveral(ForwardingGroup):
    """Dense copies of strided views are reduced, but the views are not."""

    def allreduce_coalesced(self, tensors: Any, opts: Any) -> Any:
        return super().allreduce_coalesced([x.contiguous() for x in tensors], opts)


@breaks("all_reduce_coalesced/future", says=r"rank 0 is wrong\nat \[0\]")
@breaks("all_gather_coalesced/future", says=r"rank 0 is wrong\nat \[0\]\[0\]")
@breaks("coalescing/async", says=r"rank 0 is wrong\nat \[0\]")
class AsyncCoalescingDoesNothing(ForwardingGroup):
    """An asynchronous operation on several tensors returns a handle and does nothing."""

    def allreduce_coalesced(self, tensors: Any, opts: Any) -> Any:
        return Done() if opts.asyncOp else super().allreduce_coalesced(tensors, opts)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        return Done() if opts.asyncOp else super().allgather_coalesced(outputs, inputs, opts)


@breaks("all_gather_coalesced/values", says=r"rank 0 is wrong\nat \[0\]\[32\]")
class GathersThirtyTwoTensorsAtMost(ForwardingGroup):
    """Of longer lists, the first thirty-two tensors are gathered."""

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        return super().allgather_coalesced([one[:32] for one in outputs], inputs[:32], opts)


@breaks("all_gather_coalesced/arguments", says="should be refused, and it returned")
class AllGatherCoalescedTakesMoreLists(ForwardingGroup):
    """There may be more lists than ranks."""

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        return super().allgather_coalesced(outputs[: self.size()], inputs, opts)


@breaks("all_reduce_coalesced/values", says=r"rank 0 is wrong\nat \[1\]")
class ReducesTheFirstOfSeveral(ForwardingGroup):
    """Only the first of several tensors is reduced."""

    def allreduce_coalesced(self, tensors: Any, opts: Any) -> Any:
        return super().allreduce_coalesced(tensors[:1], opts)


@breaks("all_reduce_coalesced/mixed-dtypes-refused", says=r"rank 0 is wrong\nat \[0\]")
class CoercesMixedDtypes(Replacing):
    """Tensors of several dtypes are converted to that of the first."""

    @staticmethod
    def all_reduce_coalesced(right: Any, tensors: Any, *args: Any, **how: Any) -> Any:
        same = [x.to(tensors[0].dtype) for x in tensors]
        future = right(same, *args, **how)
        for x, y in zip(tensors, same, strict=True):
            x.copy_(y)
        return future


@breaks("all_gather_coalesced/values", says=r"rank 0 is wrong\nat \[0\]\[0\]")
class GathersListsBackwards(ForwardingGroup):
    """The list of the last rank comes first."""

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        return super().allgather_coalesced(list(reversed(outputs)), inputs, opts)


@breaks("all_reduce_coalesced/reduce-ops", says=r"rank 0 is wrong")
@breaks("coalescing/reduce-op", says=r"op=min[\s\S]*rank 0 is wrong")
class ManagersAlwaysAdd(ForwardingGroup):
    def allreduce_coalesced(self, tensors: Any, opts: Any) -> Any:
        opts.reduceOp = dist.ReduceOp.SUM
        return super().allreduce_coalesced(tensors, opts)


@breaks("all_reduce_coalesced/many", says=r"rank 0 is wrong")
@breaks("coalescing/many", says=r"rank 0 is wrong")
class CoalescesSixteenTensorsAtMost(ForwardingGroup):
    """Tensors after the sixteenth of a list are left out."""

    def allreduce_coalesced(self, tensors: Any, opts: Any) -> Any:
        return super().allreduce_coalesced(tensors[:16], opts)
