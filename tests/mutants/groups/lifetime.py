"""Mutants of conformance/spec/groups/lifetime.py."""

from __future__ import annotations

import gc
import os
import threading
import time
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

import torch.distributed as dist
from torch.distributed import distributed_c10d

from conformance.power.handles import Done, Relayed
from conformance.verdict import Verdict
from impl.gloo import ProcessGroupGloo
from tests.mutants.kit import ForwardingGroup, GroupMutant, breaks
from tests.mutants.replacing import Replacing


@breaks("groups/leaves-nothing-behind", says=r"rank 0 is wrong[\s\S]*thread")
class DestroyLeavesAThread(ForwardingGroup):
    """Every group has a thread that never ends."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        threading.Thread(target=threading.Event().wait, daemon=True).start()


@breaks("destroy/handles-still-know", says=r"the group is no more")
class HandlesEndWithTheGroup(ForwardingGroup):
    """A handle cannot be used once its group is destroyed."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.is_over = threading.Event()

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        return _Unavailable(super().allreduce(tensors, opts), self)

    def shutdown(self) -> None:
        self.is_over.set()


class _Unavailable(Relayed):
    def __init__(self, inner: Any, group: HandlesEndWithTheGroup) -> None:
        super().__init__(inner)
        self.is_over = group.is_over

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self.is_over.is_set():
            raise RuntimeError("the group is no more")
        return super().wait(timeout)


@breaks("groups/is-freed", says=r"rank 0 is wrong[\s\S]*group")
class GroupsAreKept(Replacing):
    """A global list holds every group that there was."""

    kept: ClassVar[list[Any]] = []

    @staticmethod
    def destroy_process_group(right: Any, group: Any = None) -> None:
        GroupsAreKept.kept.append(dist.group.WORLD if group is None else group)
        right(group)


@breaks("groups/store-is-freed", says=r"rank 0 is wrong[\s\S]*socket")
class StoresAreKept(Replacing):
    """A global list holds every store that a group was made on."""

    kept: ClassVar[list[Any]] = []

    @staticmethod
    def init_process_group(right: Any, *args: Any, **how: Any) -> None:
        StoresAreKept.kept.append(how["store"])
        right(*args, **how)


@breaks("groups/store-is-freed", says=r"returned \['entries in pg_group_ranks'\]")
class RanksOfGroupsAreKept(Replacing):
    """A table goes on to tell, by the name, which ranks a destroyed group had."""

    @staticmethod
    def destroy_process_group(right: Any, group: Any = None) -> None:
        table: Any = distributed_c10d._world.pg_group_ranks
        before = {str(key): ranks for key, ranks in table.items()}
        right(group)
        table.update(before)


@breaks("groups/last-held-by-a-callback", says=r"SIGABRT", verdict=Verdict.CRASHED)
class CrashesWhenACallbackHoldsTheGroup(Replacing):
    """A group that a callback still holds ends the process when it is destroyed."""

    base = "impl"

    @staticmethod
    def destroy_process_group(right: Any, group: Any = None) -> None:
        holders = gc.get_referrers(*(gc.get_referrers(group) if group is not None else ()))
        if any(isinstance(holder, partial) for holder in holders):
            os.abort()
        right(group)


@breaks("destroy/one-group", says=r"has not been initialized")
class DestroyingOneGroupDestroysAll(Replacing):
    """Destroying one group destroys everything."""

    @staticmethod
    def destroy_process_group(right: Any, group: Any = None) -> None:
        right()


@breaks("destroy/in-callbacks", says=r"a callback that destroys a group hangs")
class DestroyWaitsForOtherDestroys(Replacing):
    """Destroying a group waits until no other group is being destroyed."""

    lock: ClassVar[threading.Lock] = threading.Lock()
    destroying: ClassVar[int] = 0

    @staticmethod
    def destroy_process_group(right: Any, group: Any = None) -> None:
        mutant = DestroyWaitsForOtherDestroys
        with mutant.lock:
            mutant.destroying += 1
        time.sleep(0.05)  # for the others to begin
        while mutant.destroying > 1:
            time.sleep(0.01)
        right(group)
        with mutant.lock:
            mutant.destroying -= 1


@breaks("destroy/any-order", says=r"rank 1 is wrong")
class LosesReductionsAfterDestroyOutOfOrder(Replacing):
    """When a group goes before an older one, what is reduced later is not written back."""

    alive: ClassVar[list[Any]] = []
    is_lost: ClassVar[bool] = False

    @staticmethod
    def new_group(right: Any, *args: Any, **how: Any) -> Any:
        group = right(*args, **how)
        LosesReductionsAfterDestroyOutOfOrder.alive.append(group)
        return group

    @staticmethod
    def destroy_process_group(right: Any, group: Any = None) -> None:
        mutant = LosesReductionsAfterDestroyOutOfOrder
        right(group)
        mutant.is_lost = group is not None and (mutant.is_lost or group is not mutant.alive[0])
        mutant.alive = [other for other in mutant.alive if group not in (other, None)]

    @staticmethod
    def all_reduce(right: Any, tensor: Any, *args: Any, **how: Any) -> Any:
        return right(
            tensor.clone() if LosesReductionsAfterDestroyOutOfOrder.is_lost else tensor,
            *args,
            **how,
        )


@breaks("destroy/unknown-group", says="DID NOT RAISE")
class AGroupCanBeDestroyedTwice(Replacing):
    """Destroying a group that is already destroyed raises no error."""

    @staticmethod
    def destroy_process_group(right: Any, group: Any = None) -> None:
        try:
            right(group)
        except ValueError:
            return


@breaks("destroy/default-group", says=r"rank 0 is wrong\nat \[1\]")
class CountsADestroyedGroup(Replacing):
    """The number of groups is never less than one."""

    @staticmethod
    def get_pg_count(right: Any) -> int:
        return int(right()) or 1


@breaks("destroy/non-member", says=r"raised ValueError: not a member")
class OnlyMembersDestroy(Replacing):
    @staticmethod
    def destroy_process_group(right: Any, group: Any = None) -> None:
        if group == dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError("not a member")
        right(group)


@breaks("init/again", says=r"raised RuntimeError: once is enough")
class DefaultGroupCanBeMadeOnce(Replacing):
    """A second default group in the life of a process is refused."""

    lives: ClassVar[int] = 0

    @staticmethod
    def init_process_group(right: Any, *args: Any, **how: Any) -> None:
        if DefaultGroupCanBeMadeOnce.lives:
            raise RuntimeError("once is enough")
        right(*args, **how)

    @staticmethod
    def destroy_process_group(right: Any, group: Any = None) -> None:
        DefaultGroupCanBeMadeOnce.lives += group is None
        right(group)


@breaks("init/again-on-the-same-keys", says=r"raised RuntimeError: somebody was here before")
class RefusesUsedKeys(GroupMutant, ProcessGroupGloo):
    """Keys that an earlier group wrote into a store prevent a new group there."""

    base = "impl"

    def __init__(self, store: Any, rank: int, world_size: int, timeout: timedelta) -> None:
        if store.add("ranks that came", 1) > world_size:
            raise RuntimeError("somebody was here before")
        super().__init__(store, rank, world_size, timeout)


@breaks("init/again-with-fewer-ranks", says=r"raised RuntimeError: this is rank \d")
class KeepsItsRank(Replacing):
    """A process keeps the rank that it had in its first world."""

    first: ClassVar[int | None] = None

    @staticmethod
    def init_process_group(right: Any, *args: Any, **how: Any) -> None:
        if KeepsItsRank.first is None:
            KeepsItsRank.first = how["rank"]
        elif how["rank"] != KeepsItsRank.first:
            raise RuntimeError(f"this is rank {KeepsItsRank.first}")
        right(*args, **how)


@breaks("destroy/what-was-sent-arrives", says=r"rank 1  raised RuntimeError")
class DestroyLosesBufferedMessages(ForwardingGroup):
    """A small message is over when it is in a buffer, and the end of the group empties that."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.ended = threading.Event()

    def send(self, tensors: Any, dst: int, tag: int) -> Any:
        buffered = [x.clone() for x in tensors]
        inner, ended = self.inner, self.ended

        def deliver() -> None:
            if not ended.wait(0.01):
                inner.send(buffered, dst, tag)

        threading.Thread(target=deliver).start()
        return Done()

    def shutdown(self) -> None:
        self.ended.set()


class _UndoneByAnEnd(Relayed):
    """What it has left is taken back if a group was destroyed before the wait."""

    def __init__(self, inner: Any, tensors: Any) -> None:
        super().__init__(inner)
        self.tensors = tensors
        self.before = [x.clone() for x in tensors]
        self.ended = DropsWhatIsPendingElsewhere.ended

    def wait(self, timeout: timedelta | None = None) -> bool:
        done = super().wait(timeout)
        if self.ended < DropsWhatIsPendingElsewhere.ended:
            for x, before in zip(self.tensors, self.before, strict=True):
                x.copy_(before)
        return done


@breaks("destroy/one-group", says=r"destroy_beside_pending[\s\S]*rank 0 is wrong\nat \[0\]")
class DropsWhatIsPendingElsewhere(ForwardingGroup):
    """The end of a group also ends what is pending in other groups, without a word."""

    ended: ClassVar[int] = 0

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        work = super().allreduce(tensors, opts)
        return _UndoneByAnEnd(work, tensors) if opts.asyncOp else work

    def shutdown(self) -> None:
        DropsWhatIsPendingElsewhere.ended += 1


@breaks("destroy/one-group", says=r"destroy_beside_pending", verdict=Verdict.TIMEOUT)
class DestroyWaitsForWhatIsPendingElsewhere(ForwardingGroup):
    """The end of a group waits for what is pending in other groups."""

    pending: ClassVar[list[Any]] = []

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        work = super().allreduce(tensors, opts)
        if opts.asyncOp:
            self.pending.append(work)
        return work

    def shutdown(self) -> None:
        while self.pending:
            self.pending.pop().wait()
