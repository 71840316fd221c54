"""Faults of groups: who is in them, how they are called, and what they count."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any, ClassVar

import torch.distributed as dist
from torch.distributed import distributed_c10d

from conformance.verdict import Verdict
from impl.gloo import ProcessGroupGloo
from tests.mutants.kit import ForwardingGroup, GroupFault, breaks
from tests.mutants.handles import Done
from tests.mutants.replacing import Replacing


@breaks("new_group/members", says=r"rank 0 is wrong")
class EverybodyIsAMember(Replacing):
    """The list of ranks is not looked at."""

    @staticmethod
    def new_group(right: Any, ranks: Any = None, *args: Any, **how: Any) -> Any:
        return right(None, *args, **how)


@breaks("new_group/all-ranks", says=r"rank \d is wrong")
class AllRanksAreTheWorld(Replacing):
    """A group of all ranks is the default group itself."""

    @staticmethod
    def new_group(right: Any, ranks: Any = None, *args: Any, **how: Any) -> Any:
        return dist.group.WORLD if ranks is None else right(ranks, *args, **how)


@breaks("new_group/sorted-ranks", says=r"rank 0 is wrong\nat \[0\]")
class KeepsTheOrder(Replacing):
    """Ranks stay in the order in which they were given."""

    @staticmethod
    def new_group(right: Any, *args: Any, **how: Any) -> Any:
        return right(*args, **{"sort_ranks": False, **how})


@breaks("new_group/given-order", says=r"rank 0 is wrong\nat \[0\]")
class SortsAllTheSame(Replacing):
    """sort_ranks=False is ignored."""

    @staticmethod
    def new_group(right: Any, *args: Any, **how: Any) -> Any:
        return right(*args, **{**how, "sort_ranks": True})


def _chunks_by_inverse(group: Any) -> list[int]:
    """Of each place the chunk that it gets if places are looked up the wrong way round."""
    members = dist.get_process_group_ranks(group)
    numbers = [sorted(members).index(member) for member in members]
    return [numbers[number] for number in numbers]


@breaks("new_group/given-order", says=r"rank \d is wrong\nat \[0\]")
class ScattersByTheInverse(Replacing):
    """Reductions are scattered by the inverse of the given order."""

    @staticmethod
    def reduce_scatter_tensor(right: Any, output: Any, input: Any, *args: Any, **how: Any) -> Any:
        chunks = input.view(dist.get_world_size(how.get("group")), *output.shape)
        chosen = chunks[_chunks_by_inverse(how.get("group"))]
        return right(output, chosen.view_as(input), *args, **how)

    @staticmethod
    def reduce_scatter(right: Any, output: Any, inputs: Any, *args: Any, **how: Any) -> Any:
        chosen = [inputs[i] for i in _chunks_by_inverse(how.get("group"))]
        return right(output, chosen, *args, **how)


@breaks("new_group/of-one", says=r"raised ValueError: a group of one")
class NeedsTwo(Replacing):
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
    """A group looks for what all share in the default group, and takes that to be of its kind."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        world: Any = dist.group.WORLD
        self.home = self if world is None else world.home


@breaks("new_group/different-memberships", says=r"waited in new_group", verdict=Verdict.TIMEOUT)
class CountsItsOwnGroups(Replacing):
    """The name of a group is the number of groups that this rank is in, which differs by rank."""

    @staticmethod
    def _process_group_name(right: Any, ranks: Any, use_hashed_name: bool) -> Any:
        return f"group {len(_own_groups())}"


@breaks("new_group/different-memberships-synchronized-locally", says=r"(?i)raised .*timeout")
class HashesItsOwnCount(Replacing):
    """Of hashed names alone: the number of groups that this rank is in is a part of them."""

    @staticmethod
    def _process_group_name(right: Any, ranks: Any, use_hashed_name: bool) -> Any:
        if not use_hashed_name:
            return right(ranks, use_hashed_name)
        return f"{'_'.join(map(str, ranks))} as group {len(_own_groups())}"


def _own_groups() -> list[Any]:
    return list(distributed_c10d._world.pg_map)


@breaks("new_group/local-synchronization-twice", says=r"name has already been created")
class NamesGroupsAfterTheirMembers(Replacing):
    """Two groups of the same members have one name."""

    @staticmethod
    def _process_group_name(right: Any, ranks: Any, use_hashed_name: bool) -> Any:
        if not use_hashed_name:
            return right(ranks, use_hashed_name)
        return "members " + " ".join(map(str, ranks))


@breaks("new_group/local-synchronization", says=r"got False, want True")
class StrangersGetAGroup(Replacing):
    """A rank that is no member gets something that is not None."""

    @staticmethod
    def new_group(right: Any, *args: Any, **how: Any) -> Any:
        group = right(*args, **how)
        return dist.GroupMember.NON_GROUP_MEMBER if group is None else group


@breaks("new_group/names", says=r"two groups are called alike")
class GroupsHaveNoNames(ForwardingGroup):
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
    """A group that was made just now is not ready yet."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.ready_at = time.monotonic() + 0.2

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        if time.monotonic() < self.ready_at:
            raise RuntimeError("not ready")
        return super().allreduce(tensors, opts)


@breaks("new_group/many", says=r"raised RuntimeError: no room for group 17")
class HasRoomForSixteen(ForwardingGroup):
    """There is a table of groups, and it is full soon."""

    made: ClassVar[int] = 0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        type(self).made = 1 if args[2] == 3 else self.made + 1
        if self.made > 16:
            raise RuntimeError(f"no room for group {self.made}")


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
class LeavesARest(Replacing):
    """What does not fit into equal parts is in none."""

    @staticmethod
    def new_subgroups(right: Any, group_size: int = 1, **how: Any) -> Any:
        n = dist.get_world_size()
        if not 0 < group_size <= n:
            return right(group_size, **how)
        starts = range(0, n - group_size + 1, group_size)
        lists = [list(range(start, start + group_size)) for start in starts]
        return dist.new_subgroups_by_enumeration(lists)


@breaks("new_subgroups_by_enumeration/parts", says=r"rank 0 is wrong")
class ReturnsTheLastPart(Replacing):
    """A rank gets the last group that was made, whether or not it is in it."""

    @staticmethod
    def new_subgroups_by_enumeration(right: Any, *args: Any, **how: Any) -> Any:
        _, parts = right(*args, **how)
        return parts[-1], parts


@breaks("ranks/translation", says=r"rank \d is wrong\nat \[\d\]")
class GlobalRanksAreGroupRanks(Replacing):
    @staticmethod
    def get_global_rank(right: Any, group: Any, rank: int) -> int:
        right(group, rank)
        return rank


@breaks("ranks/translation-errors", says="DID NOT RAISE")
class StrangersAreMinusOne(Replacing):
    """The group rank of a rank outside is a number like any other."""

    @staticmethod
    def get_group_rank(right: Any, group: Any, rank: int) -> Any:
        try:
            return right(group, rank)
        except ValueError:
            return -1


@breaks("ranks/non-member", says=r"rank 0 is wrong\nat \[0\]: got 0, want -1")
class EverybodyHasARank(Replacing):
    """A rank outside has its global rank in the group."""

    @staticmethod
    def get_rank(right: Any, group: Any = None) -> Any:
        rank = right(group)
        return right() if rank == -1 else rank


@breaks("backends/name", says=r"rank 0 is wrong\nat \[1\]")
@breaks("groups/backend-name", says=r"get_backend is 'custom', want 'gloo'")
class IsCalledCustom(Replacing):
    @staticmethod
    def get_backend(right: Any, group: Any = None) -> str:
        right(group)
        return "custom"


@breaks("groups/outsiders-are-told", says=r"silently returned None")
class SaysNothingToOutsiders(Replacing):
    """A call of a rank that is no member is over at once, without a word."""

    @staticmethod
    def _warn_not_in_group(right: Any, name: str) -> None:
        return


@breaks("p2p/peer-outside-the-group", says="rank 1  raised RuntimeError")
@breaks("groups/root-outside", says=r"broadcast was accepted")
class RootsOutsideMeanTheFirst(Replacing):
    """A root that is no member is taken for the first member."""

    @staticmethod
    def get_group_rank(right: Any, group: Any, rank: int) -> Any:
        try:
            return right(group, rank)
        except ValueError:
            return 0


@breaks("groups/roots-are-global", says=r"must be specified on destination rank")
class RootsAreGroupRanks(Replacing):
    """src and dst are ranks of the group, whatever it is made of."""

    @staticmethod
    def get_group_rank(right: Any, group: Any, rank: int) -> int:
        right(group, rank)
        members: int = dist.get_world_size(group)
        return rank % members


@breaks("groups/mixed-dtypes-refused", says=r"invalid tensor type")
class NobodyComparesDtypes(Replacing):
    @staticmethod
    def _ensure_all_tensors_same_dtype(right: Any, *tensors: Any) -> None:
        return


@breaks("groups/different-numbers-of-operations", says=r"waited in", verdict=Verdict.TIMEOUT)
class OneCounterForAllGroups(ForwardingGroup):
    """Messages of a collective carry a number that all groups of a process count together."""

    count: ClassVar[int] = 0

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        type(self).count += 1
        [x] = tensors
        mine = x.clone()
        for peer in range(self.size()):
            if peer != self.rank():
                other = mine.clone()
                sent = self.inner.send([mine], peer, self.count)
                self.inner.recv([other], peer, self.count).wait()
                sent.wait()
                x.add_(other)
        return Done()


@breaks("groups/several-at-once", says=r"rank \d is wrong")
class SmallGroupsLoseTheSecond(ForwardingGroup):
    """The second reduction of a group of two is forgotten while the first is under way."""

    count = 0

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        self.count += 1
        if self.size() == 2 and self.count == 2:
            return Done()
        return super().allreduce(tensors, opts)


@breaks("groups/in-any-order", says=r"rank 0 waited in all_reduce", verdict=Verdict.TIMEOUT)
class OneGroupAtATime(ForwardingGroup):
    """A reduction begins when the last one of another group is over."""

    last: ClassVar[tuple[Any, Any] | None] = None

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        fault = OneGroupAtATime
        if fault.last is not None and fault.last[0] != self.getGroupName():
            fault.last[1].wait()
        work = super().allreduce(tensors, opts)
        fault.last = (self.getGroupName(), work)
        return work


@breaks("sequence_numbers/counted", says=r"not one more each time")
class CountsEverySecond(GroupFault, ProcessGroupGloo):
    """The sequence number grows with every second collective."""

    base = "impl"

    def _get_sequence_number_for_group(self) -> int:
        return int(super()._get_sequence_number_for_group()) // 2


@breaks("sequence_numbers/of-each-group", says=r"rank 1 is wrong\nat \[0\]\[1\]: got 1, want 0")
class CountsForAllGroups(GroupFault, ProcessGroupGloo):
    """There is one sequence number in a process, and every group shows it."""

    base = "impl"
    issued: ClassVar[int] = 0

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        type(self).issued += 1
        return super().allreduce(tensors, opts)

    def _get_sequence_number_for_group(self) -> int:
        return self.issued
