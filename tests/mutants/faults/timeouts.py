"""Mutants of conformance/spec/faults/timeouts.py."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any, ClassVar

import torch.distributed as dist

from conformance.power.handles import Relayed
from conformance.verdict import Verdict
from tests.mutants.faults.kit import ChangesReductions, Forgiving, WaitsFor
from tests.mutants.kit import ForwardingGroup, breaks


@breaks("timeouts/of-the-group", says=r"gave up after 0\.\d+ s of 3\.0 s")
class GroupTimesOutTooSoon(ForwardingGroup):
    """Operations of a group have a tenth of its timeout; its ranks have all of it to meet."""

    def __init__(self, store: Any, rank: int, world_size: int, timeout: timedelta) -> None:
        super().__init__(store, rank, world_size, timeout)
        self.inner.set_timeout(timeout / 10)


@breaks("timeouts/point-to-point", says=r"rank 0 is wrong\ngot keys \['recv'\], want \[\]")
class ReceiveReturnsAtTheTimeout(ForwardingGroup):
    """A receive without a matching send returns when the timeout is over."""

    def recv(self, tensors: Any, src: int, tag: int) -> Any:
        return Forgiving(super().recv(tensors, src, tag))


class _WaitsForAMinute(Relayed):
    def wait(self, timeout: timedelta | None = None) -> bool:
        return super().wait(timeout or timedelta(minutes=1))

    def _source_rank(self) -> int:
        source: int = self.inner._source_rank()
        return source


@breaks("timeouts/point-to-point", says=r"rank 0 .* at the deadline", verdict=Verdict.TIMEOUT)
class AnySourceReceiveHasAnotherTimeout(ForwardingGroup):
    """A receive without a source has a timeout of its own."""

    def recv_anysource(self, tensors: Any, tag: int) -> Any:
        return _WaitsForAMinute(super().recv_anysource(tensors, tag))


class _Patient(Relayed):
    def wait(self, timeout: timedelta | None = None) -> bool:
        return super().wait()


@breaks("timeouts/point-to-point", says=r"rank 0 is wrong\ngot keys \['send'\], want \[\]")
class SendsTimeOutTooSoon(ForwardingGroup):
    """A send without a matching receive fails at once, whatever the timeout."""

    def send(self, tensors: Any, dst: int, tag: int) -> Any:
        return WaitsFor(super().send(tensors, dst, tag), timedelta(milliseconds=100))


@breaks("timeouts/of-wait", says=r"rank 0 went on after all_reduce", verdict=Verdict.TIMEOUT)
class WaitIgnoresItsTimeout(ChangesReductions):
    """wait uses only the group's timeout."""

    handle = _Patient


class _HasNoPatience(Relayed):
    def wait(self, timeout: timedelta | None = None) -> bool:
        if timeout is not None and not self.is_completed():
            raise RuntimeError("not completed yet")
        return super().wait()


@breaks("timeouts/of-wait", says=r"wait gave up after 0\.\d* s of 0\.2 s|not completed yet")
class WaitGivesUpAtOnce(ChangesReductions):
    """wait with a timeout does not wait."""

    handle = _HasNoPatience


@breaks("timeouts/of-barrier", says=r"barrier gave up after 0\.\d* s of 0\.2 s|cannot wait so long")
class RefusesATimeoutOfABarrier(ForwardingGroup):
    """A barrier with a timeout of its own is refused."""

    def barrier(self, opts: Any) -> Any:
        if opts.timeout < timedelta(minutes=2):
            raise RuntimeError("cannot wait so long")
        return super().barrier(opts)


@breaks("timeouts/of-barrier", says=r"how=issued barrier", verdict=Verdict.TIMEOUT)
class IssuedBarriersHaveTheTimeoutOfTheGroup(ForwardingGroup):
    """A barrier that is not waited for at once has the group's timeout."""

    def barrier(self, opts: Any) -> Any:
        if opts.asyncOp:
            opts.timeout = timedelta(minutes=5)
        return super().barrier(opts)


@breaks("timeouts/of-barrier", says=r"is_issued=\w+[\s\S]*Timed out waiting")
class NoBarrierWaitsLongerThanItsGroup(ForwardingGroup):
    """The timeout of a barrier is cut to that of its group."""

    def __init__(self, store: Any, rank: int, world_size: int, timeout: timedelta) -> None:
        super().__init__(store, rank, world_size, timeout)
        self.longest = timeout

    def barrier(self, opts: Any) -> Any:
        opts.timeout = min(opts.timeout, self.longest)
        return super().barrier(opts)


@breaks("timeouts/of-each-group", says=r"all_reduce", verdict=Verdict.TIMEOUT)
class OneTimeoutForAll(ForwardingGroup):
    """Every group has the timeout of the first."""

    first: ClassVar[timedelta | None] = None

    def __init__(self, store: Any, rank: int, world_size: int, timeout: timedelta) -> None:
        cls = type(self)
        cls.first = cls.first or timeout
        super().__init__(store, rank, world_size, cls.first)


@breaks("timeouts/late-is-not-lost", says=r"raised RuntimeError: the time is up")
class TimeoutCoversAllOperationsTogether(ForwardingGroup):
    """A group has its timeout once, for all operations together."""

    def __init__(self, store: Any, rank: int, world_size: int, timeout: timedelta) -> None:
        super().__init__(store, rank, world_size, timeout)
        self.up_at = time.monotonic() + timeout.total_seconds()

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        if time.monotonic() > self.up_at:
            raise RuntimeError("the time is up")
        return super().allreduce(tensors, opts)


@breaks("timeouts/joining", says="DID NOT RAISE")
class ContinuesAloneAfterATimeoutOfJoining(ForwardingGroup):
    """If members do not arrive in time, this rank continues in a group of its own."""

    def __init__(self, store: Any, rank: int, world_size: int, timeout: timedelta) -> None:
        try:
            super().__init__(store, rank, world_size, timeout)
        except RuntimeError:
            super().__init__(dist.PrefixStore(f"alone {rank}", store), 0, 1, timeout)


@breaks("timeouts/recovery", says=r"raised RuntimeError: it has been tried before")
class MakesNoGroupAfterATimeout(ForwardingGroup):
    """After a timeout a process makes no new group."""

    has_timed_out: ClassVar[bool] = False

    def __init__(self, *args: Any) -> None:
        if self.has_timed_out:
            raise RuntimeError("it has been tried before")
        super().__init__(*args)

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        try:
            work = super().allreduce(tensors, opts)
            work.wait()
        except RuntimeError:
            type(self).has_timed_out = True
            raise
        return work


class _EndsOthers(Relayed):
    """A wait that times out is noted for the whole process."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        try:
            return super().wait(timeout)
        except RuntimeError:
            TimeoutEndsOtherGroups.has_timed_out = True
            raise


@breaks("timeouts/of-each-group", says=r"raised RuntimeError: another group has timed out")
class TimeoutEndsOtherGroups(ForwardingGroup):
    """After a timeout in one group, the process starts nothing in others."""

    has_timed_out: ClassVar[bool] = False

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        if self.has_timed_out:
            raise RuntimeError("another group has timed out")
        return _EndsOthers(super().allreduce(tensors, opts))
