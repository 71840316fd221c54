"""Collectives that wait too little, too much, or for the wrong ones; and handles that lie."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.distributed as dist
from torch.autograd.profiler import record_function

from conformance.verdict import Verdict
from impl.gloo import ProcessGroupGloo
from tests.mutants.collectives.kit import AroundImpl
from tests.mutants.kit import ForwardingGroup, GroupFault, Patch, breaks
from tests.mutants.handles import Done, Relayed
from tests.mutants.replacing import replaced


@breaks("broadcast/async", says=r"rank \d is wrong")
class NeverReallyBroadcasts(ForwardingGroup):
    """An asynchronous broadcast is a handle and nothing more."""

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        return Done() if opts.asyncOp else super().broadcast(tensors, opts)


@breaks("barrier/waits-for-all", says=r"a rank left the barrier before rank \d had come")
class WaitsForOnePartner(ForwardingGroup):
    """Recursive doubling without the ranks beyond a power of two."""

    def barrier(self, opts: Any) -> Any:
        partner = self.rank() ^ 1
        if partner < self.size():
            theirs = self.inner.recv([torch.zeros(1)], partner, 99)
            self.inner.send([torch.ones(1)], partner, 99).wait()
            theirs.wait()
        return Done()


@breaks("barrier/repeated", says=r"rank \d is wrong")
class RunsOutOfRounds(ForwardingGroup):
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
class WaitsForTheWorld(ForwardingGroup):
    """A barrier of some ranks is one of all."""

    world: ClassVar[Any] = None

    def barrier(self, opts: Any) -> Any:
        if self.size() == 4:
            type(self).world = self.inner
        chosen = dist.group.WORLD
        assert isinstance(chosen, ForwardingGroup)
        return chosen.inner.barrier(opts)


@breaks("monitored_barrier/nobody-leaves", says=r"passed although ranks .* never came")
class HealthyRanksLeave(ForwardingGroup):
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
class NamesTheFirstAlone(ForwardingGroup):
    """wait_all_ranks is ignored."""

    def monitored_barrier(self, timeout: timedelta, wait_all_ranks: bool = False) -> None:
        super().monitored_barrier(timeout, False)


@breaks("monitored_barrier/names-a-missing-rank", says=r"rank 0 was told 'a rank failed")
class NamesNobody(ForwardingGroup):
    """Does not say who is missing."""

    def monitored_barrier(self, timeout: timedelta, wait_all_ranks: bool = False) -> None:
        try:
            super().monitored_barrier(timeout, wait_all_ranks)
        except RuntimeError as error:
            raise RuntimeError("a rank failed to pass") from error


class Relaying(AroundImpl):
    """Hands out handles of one class for all collectives that give a result."""

    handle: ClassVar[type[Relayed]] = Relayed

    def around(self, right: Callable[..., Any], taken: Any, *rest: Any) -> Any:
        return self.handle(right(taken, *rest))


@breaks("work/wait", says=r"want True")
class WaitSaysFalse(Relaying):
    class handle(Relayed):  # noqa: N801  # the attribute that it overrides
        def wait(self, timeout: timedelta | None = None) -> bool:
            super().wait(timeout)
            return False


@breaks("work/not-completed-early", says=r"rank 0 is wrong\ngot True, want False")
class CompletedAtOnce(Relaying):
    class handle(Relayed):  # noqa: N801
        def is_completed(self) -> bool:
            return True


@breaks("reduce_scatter/completes-unwaited", says=r"of reduce_scatter never became true")
@breaks("reduce_scatter_tensor/completes-unwaited", says=r"of reduce_scatter_tensor never became")
@breaks("work/completes-unwaited", says=r"is_completed of all_reduce never became true")
class CompletedByWaitAlone(Relaying):
    class handle(Relayed):  # noqa: N801
        waited = False

        def wait(self, timeout: timedelta | None = None) -> bool:
            self.waited = super().wait(timeout)
            return self.waited

        def is_completed(self) -> bool:
            return self.waited


@breaks("work/success", says=r"got \(False|got False, want True")
class NeverSucceeds(Relaying):
    class handle(Relayed):  # noqa: N801
        def is_success(self) -> bool:
            return False


@breaks("reduce_scatter/future", says=r"rank 0 is wrong")
@breaks("reduce_scatter_tensor/future", says=r"rank 0 is wrong")
@breaks("work/future", says=r"rank 0 is wrong")
class FutureHoldsNothing(Relaying):
    class handle(Relayed):  # noqa: N801
        def get_future(self) -> Any:
            return Done().get_future()


@breaks("work/result", says=r"rank 0 is wrong")
class ResultIsEmpty(Relaying):
    class handle(Relayed):  # noqa: N801
        def result(self) -> Any:
            return []


class Early:
    """A future whose callbacks run at once, on what the tensors hold by then."""

    def __init__(self, future: Any, values: list[torch.Tensor]) -> None:
        self.future = future
        self.values = values

    def wait(self) -> Any:
        return self.future.wait()

    def done(self) -> bool:
        done: bool = self.future.done()
        return done

    def value(self) -> Any:
        return self.future.value()

    def then(self, callback: Callable[[Any], Any]) -> Any:
        now: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        now.set_result(self.values)
        return now.then(callback)


@breaks("work/future-then", says=r"got 11\.0, want 31\.0")
class CallbacksRunAtOnce(ForwardingGroup):
    """A callback sees what this rank has contributed."""

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        before = [x.clone() for x in tensors]
        work = Relayed(super().allreduce(tensors, opts))
        future = work.get_future
        work.get_future = lambda: Early(future(), before)  # type: ignore[method-assign]
        return work


@breaks("work/wait-after-timeout", says=r"rank 0 is wrong[\s\S]*got nan, want 2\.0")
class GivesUpForGood(Relaying):
    class handle(Relayed):  # noqa: N801
        error: RuntimeError | None = None

        def wait(self, timeout: timedelta | None = None) -> bool:
            if self.error is not None:
                raise self.error
            try:
                return super().wait(timeout)
            except RuntimeError as error:
                self.error = error
                raise


@breaks("work/wait-timeout", says=r"wait ended with 'returned'")
class WaitReturnsAtItsTimeout(Relaying):
    class handle(Relayed):  # noqa: N801
        def wait(self, timeout: timedelta | None = None) -> bool:
            try:
                return super().wait(timeout)
            except RuntimeError:
                return False


@breaks("work/failure-is-told", says=r"exception is 'None'")
class NeverHasAnException(Relaying):
    class handle(Relayed):  # noqa: N801
        def exception(self) -> Any:
            return None


@breaks("work/failed-future", says=r"the future is not done although the collective had failed")
class FuturesEndWellOrNever(Relaying):
    class handle(Relayed):  # noqa: N801
        def get_future(self) -> Any:
            future: torch.futures.Future[Any] = torch.futures.Future()

            def pass_on(done: torch.futures.Future[Any]) -> None:
                with suppress(RuntimeError):
                    future.set_result(done.value())

            super().get_future().add_done_callback(pass_on)
            return future


@breaks("work/group-timeout", says=r"wait ended with 'returned'")
@breaks("work/peer-gone", says=r"wait ended well without the last rank")
class WaitHidesFailures(Relaying):
    class handle(Relayed):  # noqa: N801
        def wait(self, timeout: timedelta | None = None) -> bool:
            try:
                return super().wait(timeout)
            except RuntimeError:
                return True


@breaks("work/blocking-returns-none", says=r"rank 0 is wrong\ngot ")
class BlockingBarrierReturnsAHandle(Patch):
    """A barrier that has been waited for gives its handle away."""

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        def talkative(barrier: Any) -> Any:
            def waited(*args: Any, **kwargs: Any) -> Any:
                work = barrier(*args, **{**kwargs, "async_op": True})
                if work is not None and not kwargs.get("async_op"):
                    work.wait()
                return work

            return waited

        with replaced(barrier=talkative):
            yield


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
class HoldsSixtyFour(ForwardingGroup):
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


@breaks("work/profiler-ranges", says=r"rank 0 is wrong")
class RangesEndWhenTheCallReturns(GroupFault, ProcessGroupGloo):
    """A profiler sees how long it took to issue an operation, not how long that took."""

    base = "impl"

    def _enqueue(self, *args: Any) -> Any:
        named = record_function(f"{dist.get_backend()}:{args[0].operation}")
        with named, mock.patch("impl.gloo.queue.issuing.profiled", return_value=None):
            return super()._enqueue(*args)
