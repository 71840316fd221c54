"""Faults of the coalesced forms and of the coalescing manager."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed import distributed_c10d

from tests.mutants.kit import ForwardingGroup, breaks
from tests.mutants.handles import Done
from tests.mutants.replacing import Replacing


def _before_the_first_empty(tensors: Any) -> int:
    return next((i for i, x in enumerate(tensors) if x.numel() == 0), len(tensors))


@breaks("all_reduce_coalesced/empty-members", says=r"rank 0 is wrong\nat \[1\]")
@breaks("all_gather_coalesced/empty-members", says=r"rank 0 is wrong\nat \[0\]\[1\]")
class StopsAtNothing(ForwardingGroup):
    """A tensor without elements ends the list."""

    def allreduce_coalesced(self, tensors: Any, opts: Any) -> Any:
        end = _before_the_first_empty(tensors)
        return super().allreduce_coalesced(tensors[:end], opts) if end else Done()

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        end = _before_the_first_empty(inputs)
        shorter = [one[:end] for one in outputs]
        return super().allgather_coalesced(shorter, inputs[:end], opts) if end else Done()


@breaks("all_reduce_coalesced/strided", says=r"rank 0 is wrong\nat \[0\]")
class ReducesCopiesOfSeveral(ForwardingGroup):
    """Dense copies of views are reduced, and the views are not."""

    def allreduce_coalesced(self, tensors: Any, opts: Any) -> Any:
        return super().allreduce_coalesced([x.contiguous() for x in tensors], opts)


@breaks("reductions/integers-are-exact", says=r"rank \d is wrong")
class AddsSeveralIntegersAsFloats(ForwardingGroup):
    """Several tensors of int64 go through float64."""

    def allreduce_coalesced(self, tensors: Any, opts: Any) -> Any:
        if tensors[0].dtype is not torch.int64:
            return super().allreduce_coalesced(tensors, opts)
        wide = [x.to(torch.float64) for x in tensors]
        work = super().allreduce_coalesced(wide, opts)
        work.wait()
        for x, result in zip(tensors, wide, strict=True):
            x.copy_(result)
        return work


@breaks("all_reduce_coalesced/future", says=r"rank 0 is wrong\nat \[0\]")
@breaks("all_gather_coalesced/future", says=r"rank 0 is wrong\nat \[0\]\[0\]")
@breaks("coalescing/async", says=r"rank 0 is wrong\nat \[0\]")
class NeverReallyCoalesces(ForwardingGroup):
    """What is asynchronous and of several tensors is a handle and nothing more."""

    def allreduce_coalesced(self, tensors: Any, opts: Any) -> Any:
        return Done() if opts.asyncOp else super().allreduce_coalesced(tensors, opts)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        return Done() if opts.asyncOp else super().allgather_coalesced(outputs, inputs, opts)


@breaks("all_gather_coalesced/arguments", says=r"rank 0 is wrong\nat \[0\]: got False, want True")
class GathersIntoTheFirstLists(ForwardingGroup):
    """There may be more lists than ranks."""

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        return super().allgather_coalesced(outputs[: self.size()], inputs, opts)


@breaks("coalescing/all_gather_into_tensor", says=r"rank 0 is wrong\nat \[1\]")
@breaks("functional/coalesced", says=r"rank 0 is wrong\nat \[1\]\[1\]")
class GathersTheFirstOfSeveral(ForwardingGroup):
    """Of several gathers the first alone is made."""

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, *rest: Any) -> Any:
        return super().all_gather_single_coalesced(outputs[:1], inputs[:1], *rest)


@breaks("coalescing/reduce_scatter_tensor", says=r"rank 0 is wrong\nat \[1\]")
class ScattersTheFirstOfSeveral(ForwardingGroup):
    """Of several scatters the first alone is made."""

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        return super().reduce_scatter_single_coalesced(outputs[:1], inputs[:1], opts)


@breaks("coalescing/mixed-refused", says=r"the manager said 'accepted'")
class ManagersSwallowErrors(Replacing):
    """What goes wrong at the end of a manager is not told."""

    @staticmethod
    @contextlib.contextmanager
    def _coalescing_manager(right: Any, *args: Any, **how: Any) -> Iterator[Any]:
        with contextlib.suppress(RuntimeError), right(*args, **how) as manager:
            yield manager


@breaks("coalescing/no-early-wait", says=r"got 'returned True', want 'ValueError'")
class NothingIsDoneEarly(Replacing):
    """An operation inside of a manager returns the handle of one that is over."""

    @staticmethod
    def _IllegalWork(right: Any) -> Any:  # noqa: N802  # torch's name
        return Done()


@breaks("coalescing/nothing", says=r"raised IndexError: list index out of range")
class LooksAtTheFirst(Replacing):
    """A manager looks at the first of its operations, even if there is none."""

    @staticmethod
    @contextlib.contextmanager
    def _coalescing_manager(right: Any, group: Any = None, *args: Any, **how: Any) -> Iterator[Any]:
        with right(group, *args, **how) as manager:
            yield manager
            calls = distributed_c10d._world.pg_coalesce_state
            _ = calls[distributed_c10d._group_or_default_group(group)][0]
