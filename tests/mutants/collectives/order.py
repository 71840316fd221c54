"""Mutants of conformance/spec/collectives/order.py."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

import torch.distributed as dist

from conformance.power.handles import Done, Relayed
from tests.mutants.kit import ForwardingGroup, breaks


@breaks("order/repeated", says=r"rank 0 is wrong\nat \[2\]")
class WrongFromTheThirdTimeOn(ForwardingGroup):
    """The third and all later reductions do nothing."""

    times = 0

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        self.times += 1
        return super().allreduce(tensors, opts) if self.times < 3 else Done()


@breaks("order/blocking-after-async", says=r"rank 0 is wrong\nat \[0\]")
class OneBufferForAllReductions(ForwardingGroup):
    """A blocking reduction leaves its result where a pending one has its own."""

    pending: Any = None

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        work = super().allreduce(tensors, opts)
        if opts.asyncOp:
            self.pending = tensors
        elif self.pending is not None:
            work.wait()
            for x, y in zip(self.pending, tensors, strict=True):
                x.copy_(y)
        return work


@breaks("order/groups-are-apart", says=r"rank \d is wrong")
class GroupsShareTheirMessages(ForwardingGroup):
    """Groups of the same ranks are one group."""

    shared: ClassVar[dict[int, Any]] = {}

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> None:
        super().__init__(store, rank, world_size, timeout)
        # kept: dropped here, it would close its connections while another rank still makes them
        self.connected = self.inner
        self.inner = self.shared.setdefault(world_size, self.inner)


@breaks("order/many-pending", says=r"raised RuntimeError: 64 are pending")
class HoldsSixtyFourPendingCollectives(ForwardingGroup):
    """Refuses more pending collectives than its table has room for."""

    count = 0

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        self.count += 1
        if self.count > 64:
            raise RuntimeError("64 are pending")
        return super().allreduce(tensors, opts)


@breaks("order/many-in-a-row", says=r"rank \d is wrong")
class CountsInElevenBits(ForwardingGroup):
    """The 2,048th operation takes the number of the first, which was handled long ago."""

    count = 0

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        self.count += 1
        if self.count >= 1 << 11:
            return super().allreduce([tensor.clone() for tensor in tensors], opts)
        return super().allreduce(tensors, opts)


@breaks("order/many-in-a-row", says="out of slots")
class LosesASlotWithEachBroadcast(ForwardingGroup):
    """Each broadcast takes one of 200 slots of the group and does not give it back."""

    slots = 200

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        self.slots -= 1
        if self.slots < 0:
            raise RuntimeError("out of slots")
        return super().broadcast(tensors, opts)


class Late(Relayed):
    """The handle of what is issued when it is waited for, or when `issue` is called before."""

    def __init__(self, start: Callable[[], Any]) -> None:
        super().__init__(None)
        self.start = start

    def issue(self) -> None:
        if self.inner is None:
            self.inner = self.start()

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.issue()
        return super().wait(timeout)


@breaks("order/issued", says=r"rank \d is wrong")
class TheSecondOvertakesTheFirst(ForwardingGroup):
    """Rank 0's first asynchronous reduction of a group is issued after its second."""

    first: Late | None = None

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        if self.rank() == 0 and self.first is None and opts.asyncOp:
            self.first = Late(partial(super().allreduce, tensors, opts))
            return self.first
        work = super().allreduce(tensors, opts)
        if self.first is not None:
            self.first.issue()
        return work


@breaks("order/same-memory", says=r"rank 0 is wrong\nat \[2\]: \d+ of 24 elements differ")
class KnowsTensorsByTheirAddress(ForwardingGroup):
    """Memory is registered once, with the length that it had then."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> None:
        super().__init__(store, rank, world_size, timeout)
        self.bytes_at: dict[int, int] = {}

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        [x] = tensors
        bytes_ = self.bytes_at.setdefault(x.data_ptr(), x.numel() * x.element_size())
        return super().allreduce([x.view(-1)[: bytes_ // x.element_size()]], opts)


@breaks("order/world-of-one", says=r"missing connection between rank 0 and rank 0")
class RefusesAGroupOfOneRank(ForwardingGroup):
    """A group of one rank looks for a connection to itself."""

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        if self.size() == 1:
            raise RuntimeError("missing connection between rank 0 and rank 0")
        return super().allreduce(tensors, opts)
