"""Mutants of conformance/spec/collectives/work.py."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from conformance.power.handles import Done, Relayed
from conformance.verdict import Verdict
from tests.mutants.collectives.kit import OfOne, Relaying
from tests.mutants.kit import ForwardingGroup, Patch, breaks
from tests.mutants.replacing import replaced


@breaks("work/wait", says=r"want True")
class WaitSaysFalse(Relaying):
    class handle(Relayed):  # noqa: N801  # the attribute that it overrides
        def wait(self, timeout: timedelta | None = None) -> bool:
            super().wait(timeout)
            return False


class _DividesWhenWaitedFor(Relayed):
    def __init__(self, inner: Any, tensor: Tensor, by: int) -> None:
        super().__init__(inner)
        self.tensor, self.by = tensor, by

    def wait(self, timeout: timedelta | None = None) -> bool:
        done = super().wait(timeout)
        self.tensor /= self.by
        return done


@breaks("work/wait", says=r"a second wait has changed tensors")
class AveragesInEachWait(ForwardingGroup):
    """A sum is divided by the number of ranks in each wait for it."""

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        if opts.reduceOp != dist.ReduceOp.AVG:
            return super().allreduce(tensors, opts)
        opts.reduceOp = dist.ReduceOp.SUM
        return _DividesWhenWaitedFor(super().allreduce(tensors, opts), tensors[0], self.size())


@breaks("work/not-completed-early", says=r"rank 0 is wrong\ngot True, want False")
class CompletedAtOnce(Relaying):
    class handle(Relayed):  # noqa: N801
        def is_completed(self) -> bool:
            return True


@breaks("reduce_scatter/completes-unwaited", says=r"of reduce_scatter never became true")
@breaks("reduce_scatter_tensor/completes-unwaited", says=r"of reduce_scatter_tensor never became")
@breaks("work/completes-unwaited", says=r"is_completed of all_reduce never became true")
class CompletedOnlyByWait(Relaying):
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


@breaks("work/future-then", says=r"all_reduce: rank 0 is wrong\nat \[4\]")
class CallbacksRunAtOnce(ForwardingGroup):
    """A callback sees what this rank has contributed."""

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        before = [x.clone() for x in tensors]
        work = Relayed(super().allreduce(tensors, opts))
        future = work.get_future
        work.get_future = lambda: Early(future(), before)  # type: ignore[method-assign]
        return work


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


class _FirstFuture(Relayed):
    """One future is completed; it is handed out once."""

    handed_out = False

    def get_future(self) -> Any:
        if self.handed_out:
            return torch.futures.Future()
        self.handed_out = True
        return super().get_future()


@breaks(
    "work/future-at-any-time",
    says=r"after all_reduce #1[\s\S]* in values_of_futures",
    verdict=Verdict.TIMEOUT,
)
class HasOneFuture(ForwardingGroup):
    """A second future never completes."""

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        return _FirstFuture(super().allreduce(tensors, opts))


class _Guarded:
    """A future that tells of callbacks that raise."""

    def __init__(self, future: Any, on_error: Callable[[], None]) -> None:
        self.future = future
        self.on_error = on_error

    def __getattr__(self, name: str) -> Any:
        return getattr(self.future, name)

    def then(self, callback: Callable[[Any], Any]) -> Any:
        def guarded(done: Any) -> Any:
            try:
                return callback(done)
            except Exception:
                self.on_error()
                raise

        return self.future.then(guarded)


class _WithGuardedFuture(Relayed):
    def __init__(self, inner: Any, on_error: Callable[[], None]) -> None:
        super().__init__(inner)
        self.on_error = on_error

    def get_future(self) -> Any:
        return _Guarded(super().get_future(), self.on_error)


@breaks("work/callback-that-raises", says=r"raised RuntimeError: the thread of the group has ended")
class CallbacksEndTheThread(ForwardingGroup):
    """An exception in a callback ends the group's worker thread."""

    ended = False

    def end(self) -> None:
        self.ended = True

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        if self.ended:
            raise RuntimeError("the thread of the group has ended")
        return _WithGuardedFuture(super().allreduce(tensors, opts), self.end)


class _OfOneThread(Relayed):
    """Other threads than the one that issued the operation have nothing to wait for."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.thread = threading.current_thread()

    def wait(self, timeout: timedelta | None = None) -> bool:
        return threading.current_thread() is not self.thread or super().wait(timeout)


@breaks("work/wait-in-threads", says=r"all_reduce: rank 0 is wrong\nat \[0\]\[0\]")
class OnlyTheIssuingThreadCanWait(ForwardingGroup):
    """Pending operations are recorded for each thread."""

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        return _OfOneThread(super().allreduce(tensors, opts))


class _WokenOnce(Relayed):
    """Its end wakes one of those who wait."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.lock = threading.Lock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self.inner.is_completed():
            self.lock.acquire()
        return super().wait(timeout)


@breaks(
    "work/wait-in-threads",
    says=r"rank 0 .*at the deadline\n  rank 1  returned",
    verdict=Verdict.TIMEOUT,
)
class WakesOneThread(ForwardingGroup):
    def allreduce(self, tensors: Any, opts: Any) -> Any:
        return _WokenOnce(super().allreduce(tensors, opts))


class _ReadsLate(Relayed):
    """Takes its input from memory when it is waited for."""

    def __init__(self, given: Tensor, gather: Callable[[Tensor], Any]) -> None:
        super().__init__(None)
        self.memory = StorageWeakRef(given.untyped_storage())
        self.values = given.clone()
        self.gather = gather

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self.memory.expired():
            self.values.zero_()
        return bool(self.gather(self.values).wait())


@breaks("work/dropped-inputs", says=r"op='all_gather'[\s\S]*rank \d is wrong\nat \[0\]")
class KeepsNoInputs(ForwardingGroup):
    """An asynchronous operation does not keep its inputs alive."""

    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        right = super().allgather
        if not opts.asyncOp:
            return right(outputs, inputs, opts)
        return _ReadsLate(inputs[0], lambda values: right(outputs, [values], opts))


@breaks("work/not-completed-early", says=r"kind=scatter\n[\s\S]*rank 0 is wrong\ngot True")
class ScattersAreCompletedAtOnce(OfOne):
    method = "scatter"
    handle = CompletedAtOnce.handle


@breaks("work/not-completed-early", says=r"kind=all_to_all\n[\s\S]*rank 0 is wrong\ngot True")
class ExchangesAreCompletedAtOnce(OfOne):
    method = "alltoall"
    handle = CompletedAtOnce.handle


@breaks("work/wait", says=r"rank 0 is wrong\nat \[0\]: got False")
class TheWaitForABarrierSaysFalse(OfOne):
    method = "barrier"
    handle = WaitSaysFalse.handle


@breaks("work/success", says=r"rank 0 is wrong\nat \[1\]: got False")
class BarriersNeverSucceed(OfOne):
    method = "barrier"
    handle = NeverSucceeds.handle


@breaks("work/wait-in-threads", says=r"kind=gather\n[\s\S]*gather: rank 0 is wrong")
class OneThreadCanWaitForAGather(OfOne):
    method = "gather"
    handle = _OfOneThread


@breaks(
    "work/wait-in-threads", says=r"kind=barrier\n[\s\S]*at the deadline", verdict=Verdict.TIMEOUT
)
class WakesOneThreadBehindABarrier(OfOne):
    method = "barrier"
    handle = _WokenOnce


@breaks("work/future-at-any-time", says=r"kind=broadcast\n", verdict=Verdict.TIMEOUT)
class BroadcastsHaveOneFuture(OfOne):
    method = "broadcast"
    handle = _FirstFuture


class _CallbacksSeeNothing(Relayed):
    def get_future(self) -> Any:
        return Early(super().get_future(), [])


@breaks("work/future-then", says=r"kind=all_gather\n[\s\S]*all_gather: rank 0 is wrong\nat \[4\]")
class CallbacksOfAllGatherRunAtOnce(OfOne):
    method = "allgather"
    handle = _CallbacksSeeNothing


class _OnOneThread(dist.Work):
    """A collective that a group's only thread carries out, callbacks of its future included."""

    def __init__(self, thread: ThreadPoolExecutor, carry_out: Callable[[], Any]) -> None:
        super().__init__()
        self.future: torch.futures.Future[Any] = torch.futures.Future()
        self.done = thread.submit(lambda: self.future.set_result(carry_out()))

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.future.wait()
        return True

    def get_future(self) -> Any:
        return self.future


@breaks("work/callback-waits", says=r"deadline", verdict=Verdict.TIMEOUT)
class CallbacksRunWhereCollectivesDo(ForwardingGroup):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.thread = ThreadPoolExecutor(1)

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        def carry_out() -> Any:
            self.inner.allreduce(tensors, opts).wait()
            return tensors

        return _OnOneThread(self.thread, carry_out)
