"""Mutants of conformance/spec/faults/patience.py: timeouts that are too short."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from conformance.power.handles import Relayed
from impl.gloo import ProcessGroupGloo
from tests.mutants.faults.kit import Forgiving, WaitsFor
from tests.mutants.kit import ForwardingGroup, GroupMutant, breaks


@breaks("timeouts/for-one-operation", says=r"parameters  how=barrier")
class BarriersChangeTheTimeout(GroupMutant, ProcessGroupGloo):
    """The group remembers the timeout of a barrier as its own."""

    base = "impl"

    def barrier(self, opts: Any = None, *, timeout: timedelta | None = None) -> Any:
        work = super().barrier(opts, timeout=timeout)
        if opts.timeout > timedelta(0):
            self.set_timeout(opts.timeout)
        return work


@breaks("timeouts/for-one-operation", says=r"parameters  how=monitored_barrier")
class MonitoredBarriersChangeTheTimeout(GroupMutant, ProcessGroupGloo):
    """The group remembers the timeout of a monitored barrier as its own."""

    base = "impl"

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        super().monitored_barrier(timeout, wait_all_ranks)
        if timeout:
            self.set_timeout(timeout)


class _Remembered(Relayed):
    def __init__(self, inner: Any, group: ProcessGroupGloo) -> None:
        super().__init__(inner)
        self.group = group

    def wait(self, timeout: timedelta | None = None) -> bool:
        if timeout:
            self.group.set_timeout(timeout)
        return super().wait(timeout)


@breaks("timeouts/for-one-operation", says=r"parameters  how=wait")
class WaitChangesTheTimeout(GroupMutant, ProcessGroupGloo):
    """The group remembers the timeout of a wait as its own."""

    base = "impl"

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        return _Remembered(super().allreduce(tensors, opts), self)


@breaks("timeouts/ten-seconds-late", says=r"\['recv'\] is str .raised RuntimeError")
class ReceivesHaveFiveSeconds(ForwardingGroup):
    """A receive gives up after five seconds, whatever the group's timeout."""

    def recv(self, tensors: Any, src: int, tag: int) -> Any:
        return WaitsFor(super().recv(tensors, src, tag), timedelta(seconds=5))


@breaks("timeouts/ten-seconds-late", says=r"\['all_to_all_single'\] is str .raised RuntimeError")
class AllToAllHasTenSeconds(ForwardingGroup):
    """An all_to_all_single gives up after ten seconds, whatever the group's timeout."""

    def all_to_all_single(self, *args: Any) -> Any:
        return WaitsFor(super().all_to_all_single(*args), timedelta(seconds=10))


class _ReturnsAfterFiveSeconds(Forgiving, WaitsFor):
    pass


@breaks("timeouts/ten-seconds-late", says=r"\['recv'\] is .*the message is wrong")
class ReceivesReturnAfterFiveSeconds(ForwardingGroup):
    """A receive returns after five seconds, with or without a message."""

    def recv(self, tensors: Any, src: int, tag: int) -> Any:
        return _ReturnsAfterFiveSeconds(super().recv(tensors, src, tag), timedelta(seconds=5))


@breaks("timeouts/joining-late", says=r"where=init_process_group")
class JoiningTimesOutAfterFiveSeconds(ForwardingGroup):
    """Making a group waits for other ranks for five seconds, whatever its timeout."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> None:
        store.set(f"rank {rank} is here", "1")
        store.wait([f"rank {other} is here" for other in range(world_size)], timedelta(seconds=5))
        super().__init__(store, rank, world_size, timeout)


@breaks("timeouts/of-days", says=r"days=1\b")
class ForgetsTheDays(GroupMutant, ProcessGroupGloo):
    """Takes the seconds of a timeout for all of it."""

    base = "impl"

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> None:
        super().__init__(
            store, rank, world_size, timedelta(milliseconds=timeout.seconds * 1000 + 1)
        )


@breaks("timeouts/of-days", says=r"days=30\b")
class CountsMillisecondsIn32Bits(GroupMutant, ProcessGroupGloo):
    """A timeout of more than 25 days is negative, which it takes for none at all."""

    base = "impl"

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> None:
        is_too_long = timeout.total_seconds() * 1000 >= 2**31
        given = timedelta(milliseconds=1) if is_too_long else timeout
        super().__init__(store, rank, world_size, given)
