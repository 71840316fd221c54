"""Faults of what groups are made from: environment, arguments, stores, lists of ranks, meshes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from conformance.torch_private import default_store
from impl.gloo import ProcessGroupGloo
from tests.mutants.kit import ForwardingGroup, GroupFault, Patch, breaks
from tests.mutants.replacing import Replacing


@breaks("debug_level/from-environment", says=r"DID NOT RAISE ValueError")
class UnknownLevelsAreOff(Replacing):
    """A level that nobody knows is as good as none."""

    @staticmethod
    def set_debug_level_from_env(right: Any) -> None:
        try:
            right()
        except ValueError:
            dist.set_debug_level(dist.DebugLevel.OFF)


@breaks("debug_level/set", says=r"at \[0\]: got 'OFF', want 'INFO'")
class TheEnvironmentAloneSetsTheLevel(Replacing):
    @staticmethod
    def set_debug_level(right: Any, level: Any) -> None:
        dist.set_debug_level_from_env()


@breaks("debug_level/detail", says=r"at \[0\].*\n.*got 6\.0, want 3\.0")
class RehearsesInDetail(ForwardingGroup):
    """At the level DETAIL a reduction is tried out first, on the very tensors."""

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        if dist.get_debug_level() == dist.DebugLevel.DETAIL:
            super().allreduce(tensors, opts).wait()
        return super().allreduce(tensors, opts)


@breaks("node_local_rank/from-environment", says="DID NOT RAISE RuntimeError")
class TheLocalRankIsZero(Replacing):
    """Without LOCAL_RANK this is the first of its node."""

    @staticmethod
    def get_node_local_rank(right: Any, fallback: int | None = None) -> int:
        return int(right(fallback or 0))


@breaks("init/arguments", says="DID NOT RAISE")
class AStoreBeatsAMethod(Replacing):
    """Where there is a store, nobody looks at init_method."""

    @staticmethod
    def init_process_group(
        right: Any, backend: Any = None, init_method: Any = None, *args: Any, **how: Any
    ) -> None:
        right(backend, None if "store" in how else init_method, *args, **how)


@breaks("init/methods", says=r"raised RuntimeError: a FileStore will not do")
@breaks("init/stores", says=r"raised RuntimeError: a FileStore will not do")
class NeedsAServer(ForwardingGroup):
    """A group is made on a TCPStore and on nothing else."""

    def __init__(self, store: Any, *args: Any) -> None:
        under = store
        while isinstance(under, dist.PrefixStore):
            under = under.underlying_store
        if not isinstance(under, dist.TCPStore):
            raise RuntimeError(f"a {type(under).__name__} will not do")
        super().__init__(store, *args)


@breaks("init/world", says=r"rank 0 is wrong\nat \[1\]")
class SaysMoreOfANamedGroup(Replacing):
    """A group that was passed has its device in front of its backend."""

    @staticmethod
    def get_backend(right: Any, group: Any = None) -> str:
        name = str(right(group))
        return name if group is None else f"cpu:{name}"


@breaks("init/barrier-timeout", says=r"the error does not say 'Timed out init")
class SaysNotWhatTimedOut(Replacing):
    @staticmethod
    def _store_based_barrier(right: Any, *args: Any, **how: Any) -> None:
        try:
            right(*args, **how)
        except dist.DistStoreError:
            raise dist.DistStoreError("time is up") from None


@breaks("init/store-timeout", says=r"the store gave up after 0\.\d\d s of 1 s")
class TheStoreIsHasty(Replacing):
    """The seconds of the group's timeout are milliseconds in its store."""

    @staticmethod
    def init_process_group(
        right: Any, backend: Any, url: Any, timeout: Any, *args: Any, **how: Any
    ) -> None:
        right(backend, url, timeout, *args, **how)
        default_store().set_timeout(timeout / 1000)


@breaks("new_subgroups_by_enumeration/arguments", says="DID NOT RAISE ValueError")
class TheFirstListCounts(Replacing):
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
class SplitsFromTheEnd(GroupFault, ProcessGroupGloo):
    """The last of the given ranks is the first of the new group."""

    base = "impl"

    def split_group(self, ranks: Any, *args: Any, **how: Any) -> Any:
        return super().split_group(ranks[::-1], *args, **how)


@breaks("split_group/arguments", says="DID NOT RAISE ValueError")
class SplitsIntoNothing(Replacing):
    """A split without parts leaves everybody outside."""

    @staticmethod
    def split_group(right: Any, *args: Any, split_ranks: Any = None, **how: Any) -> Any:
        return right(*args, split_ranks=split_ranks, **how) if split_ranks else None


@breaks("ranks/default-group", says=r"rank 0 is wrong\nat \[2\]")
@breaks("device_mesh/slices", says=r"rank 0 is wrong\nat \[0\]")
@breaks("device_mesh/dimensions", says=r"rank 0 is wrong\nat \[1\]\[0\]\[0\]: got 1, want 0")
class GroupsOfAMeshAreBackwards(Replacing):
    """The ranks of a group of a mesh are those of its mirror image."""

    @staticmethod
    def get_process_group_ranks(right: Any, group: Any = None) -> list[int]:
        return [dist.get_world_size() - 1 - rank for rank in right(group)]


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


@breaks("sequence_numbers/agree", says=r"rank 1 is wrong\nat \[0\]: got 1, want 0")
class NumbersBeginAtTheRank(GroupFault, ProcessGroupGloo):
    base = "impl"

    def _get_sequence_number_for_group(self) -> int:
        return int(super()._get_sequence_number_for_group()) + self.rank()


@breaks("sequence_numbers/show-who-is-behind", says=r"rank 0 is wrong\nat \[0\]: got 0, want 1")
class CountsWhatIsOver(GroupFault, ProcessGroupGloo):
    """A collective is counted when it is over, not when it is issued."""

    base = "impl"

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        self.works: list[Any] = []
        super().__init__(store, rank, size, timeout)

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        self.works.append(super().allreduce(tensors, opts))
        return self.works[-1]

    def _get_sequence_number_for_group(self) -> int:
        under_way = sum(not work.is_completed() for work in self.works)
        return int(super()._get_sequence_number_for_group()) - under_way


@breaks("new_group/given-order-of-peers", says=r"raised RuntimeError: .*Pair is not connected")
class MessagesKnowSortedRanks(ForwardingGroup):
    """Collectives go by the order of the list, messages by the ascending one."""

    def peer(self, place: int) -> int:
        members = dist.get_process_group_ranks(self)
        return members.index(sorted(members)[place])

    def send(self, tensors: Any, dst: int, tag: int) -> Any:
        return super().send(tensors, self.peer(dst), tag)

    def recv(self, tensors: Any, src: int, tag: int) -> Any:
        return super().recv(tensors, self.peer(src), tag)
