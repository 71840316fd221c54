"""Mutants of conformance/spec/collectives/barriers.py."""

from __future__ import annotations

import time
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from conformance.power.handles import Done, Relayed
from conformance.verdict import Verdict
from tests.mutants.faults.kit import Forgiving
from tests.mutants.kit import ForwardingGroup, breaks


class _Complete(Relayed):
    def is_completed(self) -> bool:
        return True


@breaks("barrier/async", says=r"rank 0 is wrong\nat \[0\]: got True, want False")
class BarriersAreCompleteAtOnce(ForwardingGroup):
    """The handle of an asynchronous barrier reports completion at once."""

    def barrier(self, opts: Any) -> Any:
        return _Complete(super().barrier(opts))


@breaks("barrier/several-pending", says=r"rank 0 is wrong\nat \[0\]: got True, want False")
class PendingBarriersAreOne(ForwardingGroup):
    """A barrier that is issued while one is pending is that one."""

    _pending: Any = None

    def barrier(self, opts: Any) -> Any:
        if self._pending is None or self._pending.is_completed():
            self._pending = super().barrier(opts)
        return self._pending


@breaks("barrier/waits-for-all", says=r"a rank left the barrier before rank \d had come")
class BarrierSkipsRanksBeyondAPowerOfTwo(ForwardingGroup):
    """The barrier uses recursive doubling and leaves out ranks beyond a power of two."""

    def barrier(self, opts: Any) -> Any:
        partner = self.rank() ^ 1
        if partner < self.size():
            theirs = self.inner.recv([torch.zeros(1)], partner, 99)
            self.inner.send([torch.ones(1)], partner, 99).wait()
            theirs.wait()
        return Done()


@breaks("barrier/repeated", says=r"rank \d is wrong")
class BarriersStopWaitingAfterTheSixth(ForwardingGroup):
    """From the seventh on, barriers do not wait; the last rank is slow, so that it shows."""

    count = 0

    def barrier(self, opts: Any) -> Any:
        self.count += 1
        if self.count <= 6:
            return super().barrier(opts)
        if self.rank() == self.size() - 1:
            time.sleep(0.02)
        return Done()


@breaks("barrier/subgroup", says=r"waited in barrier", verdict=Verdict.TIMEOUT)
class BarrierWaitsForTheWorld(ForwardingGroup):
    """A barrier of a subgroup waits for all ranks."""

    world: ClassVar[Any] = None

    def barrier(self, opts: Any) -> Any:
        if self.size() == 4:
            type(self).world = self.inner
        chosen = dist.group.WORLD
        assert isinstance(chosen, ForwardingGroup)
        return chosen.inner.barrier(opts)


@breaks("barrier/timeout", says=r"rank 0's barrier ended with ''")
@breaks("timeouts/of-barrier", says="DID NOT RAISE")
class BarrierReturnsAtItsTimeout(ForwardingGroup):
    """A barrier whose timeout is over returns instead of raising."""

    def barrier(self, opts: Any) -> Any:
        return Forgiving(super().barrier(opts))
