"""Mutants of conformance/spec/groups/subgroups.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from impl.gloo import ProcessGroupGloo
from tests.mutants.kit import GroupMutant, Patch, breaks
from tests.mutants.replacing import Replacing


@breaks("new_subgroups/equal-parts", says=r"rank \d is wrong\nat \[1\]\[0\]")
class DealsRanksInTurn(Replacing):
    """Rank r is in part r modulo the number of parts."""

    @staticmethod
    def new_subgroups(right: Any, group_size: int = 1, **how: Any) -> Any:
        n = dist.get_world_size()
        if n % group_size:
            return right(group_size, **how)
        parts = n // group_size
        return dist.new_subgroups_by_enumeration([list(range(i, n, parts)) for i in range(parts)])


@breaks("new_subgroups/arguments", says="DID NOT RAISE")
class NewSubgroupsLeaveOutTheRemainder(Replacing):
    """Ranks that do not fit into equal parts are in no group."""

    @staticmethod
    def new_subgroups(right: Any, group_size: int = 1, **how: Any) -> Any:
        n = dist.get_world_size()
        if not 0 < group_size <= n:
            return right(group_size, **how)
        starts = range(0, n - group_size + 1, group_size)
        lists = [list(range(start, start + group_size)) for start in starts]
        return dist.new_subgroups_by_enumeration(lists)


@breaks(
    "new_subgroups/of-a-group",
    says=r"rank 2 is wrong\nat \[0\]\[0\]: got NoneType",
)
class DividesTheFirstRanksOfTheWorld(Replacing):
    """As many as the group has."""

    @staticmethod
    def new_subgroups(right: Any, group_size: int = 1, group: Any = None, **how: Any) -> Any:
        if group is None:
            return right(group_size, group, **how)
        firsts = range(0, dist.get_world_size(group), group_size)
        lists = [list(range(first, first + group_size)) for first in firsts]
        return dist.new_subgroups_by_enumeration(lists)


@breaks("new_subgroups_by_enumeration/parts", says=r"rank 0 is wrong")
class ReturnsTheLastPart(Replacing):
    """A rank gets the last group that was made, whether or not it is in it."""

    @staticmethod
    def new_subgroups_by_enumeration(right: Any, *args: Any, **how: Any) -> Any:
        _, parts = right(*args, **how)
        return parts[-1], parts


@breaks("new_subgroups_by_enumeration/arguments", says="DID NOT RAISE ValueError")
class TakesARankInTwoLists(Replacing):
    """A rank that stands in two lists is in the first of them."""

    @staticmethod
    def new_subgroups_by_enumeration(right: Any, lists: Any, *args: Any, **how: Any) -> Any:
        seen: set[int] = set()
        parts = []
        for ranks in lists or []:
            parts.append([rank for rank in ranks if rank not in seen])
            seen.update(ranks)
        return right([part for part in parts if part], *args, **how)


@breaks("split_group/parts", says=r"rank 0 is wrong\nat \[1\]: got 1, want 0")
class SplitsFromTheEnd(GroupMutant, ProcessGroupGloo):
    """The last of the given ranks is the first of the new group."""

    base = "impl"

    def split_group(self, ranks: Any, *args: Any, **how: Any) -> Any:
        return super().split_group(ranks[::-1], *args, **how)


@breaks("split_group/arguments", says="DID NOT RAISE ValueError")
class SplitsIntoNothing(Replacing):
    """A split without parts leaves every rank outside."""

    @staticmethod
    def split_group(right: Any, *args: Any, split_ranks: Any = None, **how: Any) -> Any:
        return right(*args, split_ranks=split_ranks, **how) if split_ranks else None


@breaks("device_mesh/arguments", says="DID NOT RAISE KeyError")
class UnknownNamesAreTheWholeMesh(Patch):
    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        right: Any = DeviceMesh.__getitem__

        def lenient(self: Any, names: Any) -> Any:
            try:
                return right(self, names)
            except KeyError:
                return self

        with mock.patch.object(DeviceMesh, "__getitem__", lenient):
            yield
