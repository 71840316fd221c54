"""Mutants of conformance/spec/collectives/coalescing_manager.py."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.distributed import distributed_c10d

from conformance.power.handles import Done
from tests.mutants.kit import ForwardingGroup, breaks
from tests.mutants.replacing import Replacing


@breaks("coalescing/all_gather_into_tensor", says=r"rank 0 is wrong\nat \[1\]")
@breaks("functional/coalesced", says=r"rank 0 is wrong\nat \[1\]\[1\]")
class GathersTheFirstOfSeveral(ForwardingGroup):
    """Only the first of several gathers is carried out."""

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, *rest: Any) -> Any:
        return super().all_gather_single_coalesced(outputs[:1], inputs[:1], *rest)


@breaks("coalescing/reduce_scatter_tensor", says=r"rank 0 is wrong\nat \[1\]")
class ScattersTheFirstOfSeveral(ForwardingGroup):
    """Only the first of several scatters is carried out."""

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        return super().reduce_scatter_single_coalesced(outputs[:1], inputs[:1], opts)


@breaks("coalescing/mixed-refused", says=r"the manager said 'accepted'")
class ManagersSwallowErrors(Replacing):
    """An error at the end of a coalescing manager is not raised."""

    @staticmethod
    @contextlib.contextmanager
    def _coalescing_manager(right: Any, *args: Any, **how: Any) -> Iterator[Any]:
        with contextlib.suppress(RuntimeError), right(*args, **how) as manager:
            yield manager


@breaks("coalescing/no-early-wait", says=r"got 'returned True', want 'ValueError'")
class OperationsInAManagerReturnADoneHandle(Replacing):
    """An operation inside a manager returns the handle of a complete one."""

    @staticmethod
    def _IllegalWork(right: Any) -> Any:  # noqa: N802  # torch's name
        return Done()


@breaks("coalescing/nothing", says=r"raised IndexError: list index out of range")
class ManagerNeedsAnOperation(Replacing):
    """A manager looks at the first of its operations, even if there is none."""

    @staticmethod
    @contextlib.contextmanager
    def _coalescing_manager(right: Any, group: Any = None, *args: Any, **how: Any) -> Iterator[Any]:
        with right(group, *args, **how) as manager:
            yield manager
            calls = distributed_c10d._world.pg_coalesce_state
            _ = calls[distributed_c10d._group_or_default_group(group)][0]


@breaks("coalescing/all_reduce", says=r"rank 0 is wrong\nat \[0\]")
class ManagersReduceTheLast(Replacing):
    """Only the last reduction in a manager is carried out."""

    @staticmethod
    def all_reduce(right: Any, tensor: Any, *args: Any, **how: Any) -> Any:
        work = right(tensor, *args, **how)
        group = distributed_c10d._group_or_default_group(how.get("group"))
        collected = distributed_c10d._world.pg_coalesce_state.get(group, [])
        del collected[:-1]
        return work


@breaks("coalescing/other-operations", says=r"rank 0 is wrong\nat \[0\]")
class ReducesInManagersAreDoubled(Replacing):
    """A reduce in a manager runs when it is called, and again at the end of the manager."""

    @staticmethod
    def reduce(right: Any, tensor: Any, *args: Any, **how: Any) -> Any:
        work = right(tensor, *args, **how)
        group = distributed_c10d._group_or_default_group(how.get("group"))
        if group in distributed_c10d._world.pg_coalesce_state:
            right(tensor, *args, **how)
        return work
