"""Mutants of conformance/spec/groups/new_group.py."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any, ClassVar
from unittest import mock

import torch.distributed as dist
from torch.distributed import distributed_c10d

from conformance.verdict import Verdict
from tests.mutants.kit import ForwardingGroup, breaks
from tests.mutants.replacing import Replacing


@breaks("new_group/members", says=r"rank 0 is wrong")
class NewGroupIgnoresTheRanks(Replacing):
    """The list of ranks is ignored."""

    @staticmethod
    def new_group(right: Any, ranks: Any = None, *args: Any, **how: Any) -> Any:
        return right(None, *args, **how)


@breaks("new_group/all-ranks", says=r"rank \d is wrong")
class GroupOfAllRanksIsTheDefaultGroup(Replacing):
    """A group of all ranks is the default group itself."""

    @staticmethod
    def new_group(right: Any, ranks: Any = None, *args: Any, **how: Any) -> Any:
        return dist.group.WORLD if ranks is None else right(ranks, *args, **how)


@breaks("new_group/of-one", says=r"raised ValueError: a group of one")
class RefusesGroupsOfOneRank(Replacing):
    @staticmethod
    def new_group(right: Any, ranks: Any = None, *args: Any, **how: Any) -> Any:
        if ranks is not None and len(ranks) == 1:
            raise ValueError("a group of one")
        return right(ranks, *args, **how)


@breaks("new_group/bad-ranks", says="DID NOT RAISE ValueError")
class MergesRanksThatOccurTwice(Replacing):
    @staticmethod
    def new_group(right: Any, ranks: Any = None, *args: Any, **how: Any) -> Any:
        return right(None if ranks is None else list(dict.fromkeys(ranks)), *args, **how)


@breaks("new_group/bad-arguments", says="DID NOT RAISE TypeError")
class TakesSeconds(Replacing):
    """A timeout may be a number of seconds."""

    @staticmethod
    def new_group(right: Any, ranks: Any = None, timeout: Any = None, **how: Any) -> Any:
        if isinstance(timeout, int | float):
            timeout = timedelta(seconds=timeout)
        return right(ranks, timeout, **how)


@breaks("new_group/another-backend", says=r"has no attribute 'home'")
class TakesTheWorldForItsOwn(ForwardingGroup):
    """A group uses the default group as if it had the same backend."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        world: Any = dist.group.WORLD
        self.home = self if world is None else world.home


def _own_groups() -> list[Any]:
    return list(distributed_c10d._world.pg_map)


@breaks("new_group/different-memberships", says=r"waited in new_group", verdict=Verdict.TIMEOUT)
class CountsItsOwnGroups(Replacing):
    """The name of a group is the number of groups that this rank is in, which differs between
    ranks."""

    @staticmethod
    def _process_group_name(right: Any, ranks: Any, use_hashed_name: bool) -> Any:
        return f"group {len(_own_groups())}"


@breaks("new_group/different-memberships-synchronized-locally", says=r"(?i)raised .*timeout")
class HashesItsOwnCount(Replacing):
    """Hashed names include the number of groups that this rank is in."""

    @staticmethod
    def _process_group_name(right: Any, ranks: Any, use_hashed_name: bool) -> Any:
        if not use_hashed_name:
            return right(ranks, use_hashed_name)
        return f"{'_'.join(map(str, ranks))} as group {len(_own_groups())}"


@breaks("new_group/local-synchronization-twice", says=r"name has already been created")
class NamesGroupsAfterTheirMembers(Replacing):
    """Two groups of the same members have one name."""

    @staticmethod
    def _process_group_name(right: Any, ranks: Any, use_hashed_name: bool) -> Any:
        if not use_hashed_name:
            return right(ranks, use_hashed_name)
        return "members " + " ".join(map(str, ranks))


@breaks("new_group/local-synchronization", says=r"got False, want True")
class NonMembersGetAGroup(Replacing):
    """A rank that is not a member gets the default group."""

    @staticmethod
    def new_group(right: Any, *args: Any, **how: Any) -> Any:
        group = right(*args, **how)
        others = None, dist.GroupMember.NON_GROUP_MEMBER
        return dist.group.WORLD if group in others else group


@breaks("new_group/local-synchronization-again", says="already registered")
class KeepsTheNamesOfDestroyedGroups(Replacing):
    @staticmethod
    def destroy_process_group(right: Any, group: Any = None) -> None:
        with mock.patch.object(distributed_c10d, "_unregister_process_group"):
            right(group)


@breaks("new_group/names", says=r"two groups are called alike")
class AllGroupsHaveTheSameName(ForwardingGroup):
    """Every group is called the same."""

    def getGroupName(self) -> str:  # noqa: N802  # torch's name
        return "group"


@breaks("new_group/description", says=r"rank 0 is wrong\nat \[1\]")
class ForgetsDescriptions(Replacing):
    @staticmethod
    def new_group(right: Any, *args: Any, **how: Any) -> Any:
        how.pop("group_desc", None)
        return right(*args, **how)


@breaks("new_group/count", says=r"rank \d is wrong")
class CountsMembershipsAlone(Replacing):
    """Groups of other ranks are not counted."""

    @staticmethod
    def get_pg_count(right: Any) -> int:
        return len(_own_groups())


@breaks("new_group/used-at-once", says=r"raised RuntimeError: not ready")
class RefusesTheFirstOperation(ForwardingGroup):
    """The first operation in a new group is refused."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.ready_at = time.monotonic() + 0.2

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        if time.monotonic() < self.ready_at:
            raise RuntimeError("not ready")
        return super().allreduce(tensors, opts)


@breaks("new_group/many", says=r"raised RuntimeError: no room for group 17")
class SixteenGroupsAtMost(ForwardingGroup):
    """The table of groups has sixteen entries."""

    made: ClassVar[int] = 0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        type(self).made = 1 if args[2] == 3 else self.made + 1
        if self.made > 16:
            raise RuntimeError(f"no room for group {self.made}")
