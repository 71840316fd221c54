"""Mutants of conformance/spec/groups/outsiders.py."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from tests.mutants.kit import breaks
from tests.mutants.replacing import Replacing


@breaks("groups/outsiders-are-told", says=r"silently returned None")
class SaysNothingToOutsiders(Replacing):
    """A call by a rank that is not a member returns at once, without a warning."""

    @staticmethod
    def _warn_not_in_group(right: Any, name: str) -> None:
        return


@breaks("groups/roots-are-global", says=r"must be specified on destination rank")
class RootsAreGroupRanks(Replacing):
    """src and dst are ranks of the group, whatever it is made of."""

    @staticmethod
    def get_group_rank(right: Any, group: Any, rank: int) -> int:
        right(group, rank)
        members: int = dist.get_world_size(group)
        return rank % members
