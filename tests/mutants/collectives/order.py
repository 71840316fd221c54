"""Handles that can be waited for in one way alone, and operations that let go too early."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from conformance.verdict import Verdict
from tests.mutants.kit import ForwardingGroup, breaks
from tests.mutants.handles import Relayed


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
    says=r"after all_reduce #1[\s\S]* in futures_at_any_time",
    verdict=Verdict.TIMEOUT,
)
class HasOneFuture(ForwardingGroup):
    """Nobody completes a second future."""

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
    """An exception of a callback ends the thread that carries out what the group does."""

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


@breaks("work/wait-in-threads", says=r"rank 0 is wrong\nat \[0\]: 3 of 3 elements differ")
class ThreadsWaitForTheirOwn(ForwardingGroup):
    """What is under way is noted for each thread."""

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
    """An asynchronous operation knows where its input was, and does not hold it."""

    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        right = super().allgather
        if not opts.asyncOp:
            return right(outputs, inputs, opts)
        return _ReadsLate(inputs[0], lambda values: right(outputs, [values], opts))
