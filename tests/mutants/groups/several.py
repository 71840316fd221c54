"""Mutants of conformance/spec/groups/several.py."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, ClassVar

from conformance.power.handles import Done
from conformance.verdict import Verdict
from impl.gloo import ProcessGroupGloo
from tests.mutants.kit import ForwardingGroup, GroupMutant, breaks


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
    """A reduction begins only when the last one of another group is complete."""

    last: ClassVar[tuple[Any, Any] | None] = None

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        mutant = OneGroupAtATime
        if mutant.last is not None and mutant.last[0] != self.getGroupName():
            mutant.last[1].wait()
        work = super().allreduce(tensors, opts)
        mutant.last = (self.getGroupName(), work)
        return work


@breaks("sequence_numbers/counted", says=r"not one more each time")
class CountsEverySecond(GroupMutant, ProcessGroupGloo):
    """The sequence number grows with every second collective."""

    base = "impl"

    def _get_sequence_number_for_group(self) -> int:
        return int(super()._get_sequence_number_for_group()) // 2


@breaks("sequence_numbers/of-each-group", says=r"rank 1 is wrong\nat \[0\]\[1\]: got 1, want 0")
class CountsForAllGroups(GroupMutant, ProcessGroupGloo):
    """There is one sequence number in a process, and every group shows it."""

    base = "impl"
    issued: ClassVar[int] = 0

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        type(self).issued += 1
        return super().allreduce(tensors, opts)

    def _get_sequence_number_for_group(self) -> int:
        return self.issued


@breaks("sequence_numbers/agree", says=r"rank 1 is wrong\nat \[0\]: got 1, want 0")
class NumbersBeginAtTheRank(GroupMutant, ProcessGroupGloo):
    base = "impl"

    def _get_sequence_number_for_group(self) -> int:
        return int(super()._get_sequence_number_for_group()) + self.rank()


@breaks("sequence_numbers/show-who-is-behind", says=r"rank 0 is wrong\nat \[0\]: got 0, want 1")
class CountsWhatIsOver(GroupMutant, ProcessGroupGloo):
    """A collective is counted when it is complete, not when it is issued."""

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


@breaks("sequence_numbers/counted", says=r"not one more each time")
class DoesNotCountScatters(GroupMutant, ProcessGroupGloo):
    """scatter is the one operation that does not raise the sequence number."""

    base = "impl"
    scatters = 0

    def scatter(self, *args: Any) -> Any:
        self.scatters += 1
        return super().scatter(*args)

    def _get_sequence_number_for_group(self) -> int:
        return int(super()._get_sequence_number_for_group()) - self.scatters
