"""Mutants of conformance/spec/groups/ranks.py."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from tests.mutants.kit import breaks
from tests.mutants.replacing import Replacing


@breaks("ranks/translation", says=r"rank \d is wrong\nat \[\d\]")
class GlobalRanksAreGroupRanks(Replacing):
    @staticmethod
    def get_global_rank(right: Any, group: Any, rank: int) -> int:
        right(group, rank)
        return rank


@breaks("ranks/translation-errors", says="DID NOT RAISE")
class GroupRankOfANonMemberIsMinusOne(Replacing):
    """The group rank of a rank outside is a number like any other."""

    @staticmethod
    def get_group_rank(right: Any, group: Any, rank: int) -> Any:
        try:
            return right(group, rank)
        except ValueError:
            return -1


@breaks("ranks/non-member", says=r"rank 0 is wrong\nat \[0\]: got 0, want -1")
class NonMembersHaveAGroupRank(Replacing):
    """A rank outside has its global rank in the group."""

    @staticmethod
    def get_rank(right: Any, group: Any = None) -> Any:
        rank = right(group)
        return right() if rank == -1 else rank


@breaks("groups/mixed-dtypes-refused", says=r"invalid tensor type")
class DoesNotCompareDtypes(Replacing):
    @staticmethod
    def _ensure_all_tensors_same_dtype(right: Any, *tensors: Any) -> None:
        return


@breaks("init/world", says=r"rank 0 is wrong\nat \[1\]")
class SaysMoreOfANamedGroup(Replacing):
    """A group that was passed has its device in front of its backend."""

    @staticmethod
    def get_backend(right: Any, group: Any = None) -> str:
        name = str(right(group))
        return name if group is None else f"cpu:{name}"


@breaks("ranks/default-group", says=r"rank 0 is wrong\nat \[2\]")
@breaks("device_mesh/slices", says=r"rank 0 is wrong\nat \[0\]")
@breaks("device_mesh/dimensions", says=r"rank 0 is wrong\nat \[1\]\[0\]\[0\]: got 1, want 0")
class GroupsOfAMeshAreBackwards(Replacing):
    """The ranks of a group of a mesh are those of its mirror image."""

    @staticmethod
    def get_process_group_ranks(right: Any, group: Any = None) -> list[int]:
        return [dist.get_world_size() - 1 - rank for rank in right(group)]
