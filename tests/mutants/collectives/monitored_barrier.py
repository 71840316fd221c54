"""Mutants of conformance/spec/collectives/monitored_barrier.py."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.mutants.kit import ForwardingGroup, breaks


@breaks("arguments/timeout", says=r"got 'taken', want 'TypeError'")
class MonitoredBarrierTakesAnyTimeout(ForwardingGroup):
    """Something that is not a timeout means the default timeout."""

    def monitored_barrier(self, timeout: Any, wait_all_ranks: bool = False) -> None:
        if not isinstance(timeout, timedelta | int | float):
            timeout = timedelta(minutes=30)
        super().monitored_barrier(timeout, wait_all_ranks)


@breaks("monitored_barrier/passes", says=r"raised RuntimeError: nobody to wait for")
class MonitoredBarrierRefusesOneRank(ForwardingGroup):
    """A group of one rank has no monitored barrier."""

    def monitored_barrier(self, timeout: timedelta, wait_all_ranks: bool = False) -> None:
        if self.size() == 1:
            raise RuntimeError("nobody to wait for")
        super().monitored_barrier(timeout, wait_all_ranks)


@breaks("monitored_barrier/passes", says=r"rank 0  raised RuntimeError: 3 messages")
class MonitoredBarriersCountMessages(ForwardingGroup):
    """Ranks that have exchanged more messages than others are in another barrier."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.messages = 0

    def send(self, tensors: Any, dst: int, tag: int) -> Any:
        self.messages += 1
        return super().send(tensors, dst, tag)

    def recv(self, tensors: Any, src: int, tag: int) -> Any:
        self.messages += 1
        return super().recv(tensors, src, tag)

    def monitored_barrier(self, timeout: timedelta, wait_all_ranks: bool = False) -> None:
        counts = [torch.zeros(1) for _ in range(self.size())]
        self.inner.allgather([counts], [torch.full((1,), float(self.messages))]).wait()
        if any(int(count) != self.messages for count in counts):
            raise RuntimeError(f"{self.messages} messages")
        super().monitored_barrier(timeout, wait_all_ranks)


@breaks("monitored_barrier/names-a-missing-rank", says=r"missing=\[3\][\s\S]*told 'passed'")
class DoesNotWaitForTheLastOfFour(ForwardingGroup):
    """Rank 0 passes where the last of four or more ranks is missing."""

    def monitored_barrier(self, timeout: timedelta, wait_all_ranks: bool = False) -> None:
        try:
            super().monitored_barrier(timeout, wait_all_ranks)
        except RuntimeError as error:
            last = self.size() - 1
            if wait_all_ranks or last < 3 or f"Rank {last} failed" not in str(error):
                raise


@breaks("monitored_barrier/healthy-ranks-are-told", says=r"rank 1 was told 'timed out'")
class OnlyRankZeroGetsDetails(ForwardingGroup):
    """Ranks that did arrive are told only that the time is over."""

    def monitored_barrier(self, timeout: timedelta, wait_all_ranks: bool = False) -> None:
        try:
            super().monitored_barrier(timeout, wait_all_ranks)
        except RuntimeError as error:
            raise error if self.rank() == 0 else RuntimeError("timed out") from error


@breaks("monitored_barrier/subgroup", says=r"raised RuntimeError: rank [13] is no rank of this")
class MonitoredBarrierReportsGlobalRanks(ForwardingGroup):
    """A rank reports by its global rank, which its group does not know."""

    def monitored_barrier(self, timeout: timedelta, wait_all_ranks: bool = False) -> None:
        if dist.get_rank() != self.rank():
            raise RuntimeError(f"rank {dist.get_rank()} is no rank of this group")
        super().monitored_barrier(timeout, wait_all_ranks)


@breaks("monitored_barrier/between-collectives", says=r"rank 0 is wrong")
class MonitoredBarrierOverwritesTheLastSum(ForwardingGroup):
    """What ranks report goes through the memory of the collective before."""

    last: Any = None

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        work = super().allreduce(tensors, opts)
        self.last = tensors[0], work
        return work

    def monitored_barrier(self, timeout: timedelta, wait_all_ranks: bool = False) -> None:
        super().monitored_barrier(timeout, wait_all_ranks)
        if self.last is not None:
            tensor, work = self.last
            work.wait()
            tensor.fill_(1)


@breaks("monitored_barrier/names-ranks-of-the-group", says=r"was told 'Rank 3 failed")
class NamesRanksOfTheWorld(ForwardingGroup):
    """The missing rank of a group has its global number."""

    def monitored_barrier(self, timeout: timedelta, wait_all_ranks: bool = False) -> None:
        members = dist.get_process_group_ranks(self)
        try:
            super().monitored_barrier(timeout, wait_all_ranks)
        except RuntimeError as error:
            ranks = re.findall(r"Rank (\d+) failed", str(error))
            named = " ".join(f"Rank {members[int(rank)]} failed" for rank in ranks)
            raise RuntimeError(named) from error


@breaks("monitored_barrier/nobody-leaves", says=r"passed although ranks .* never came")
class HealthyRanksLeaveTheMonitoredBarrier(ForwardingGroup):
    """Rank 0 alone waits for all; the others leave when they have told it that they are there."""

    def monitored_barrier(self, timeout: timedelta, wait_all_ranks: bool = False) -> None:
        tag = 98
        if self.rank():
            self.inner.send([torch.ones(1)], 0, tag).wait()
            return
        for rank in range(1, self.size()):
            if not self.inner.recv([torch.zeros(1)], rank, tag).wait(timeout):
                raise RuntimeError(f"[Rank 0]: Rank {rank} failed to pass monitoredBarrier")


@breaks("monitored_barrier/names-all-missing-ranks", says=r"rank 0 was told '.*Rank 1 failed")
class NamesOnlyTheFirstMissingRank(ForwardingGroup):
    """wait_all_ranks is ignored."""

    def monitored_barrier(self, timeout: timedelta, wait_all_ranks: bool = False) -> None:
        super().monitored_barrier(timeout, False)


@breaks("monitored_barrier/names-a-missing-rank", says=r"rank 0 was told 'a rank failed")
class NamesNoMissingRank(ForwardingGroup):
    """Does not say who is missing."""

    def monitored_barrier(self, timeout: timedelta, wait_all_ranks: bool = False) -> None:
        try:
            super().monitored_barrier(timeout, wait_all_ranks)
        except RuntimeError as error:
            raise RuntimeError("a rank failed to pass") from error
