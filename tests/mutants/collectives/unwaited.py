"""Collectives that are finished by whoever waits, begin there, or keep other threads waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar

from torch import Tensor

from tests.mutants.collectives.kit import AroundImpl, all_of, mapped
from tests.mutants.kit import ForwardingGroup, breaks
from tests.mutants.handles import Relayed


class _CopiesAtWait(Relayed):
    def __init__(self, inner: Any, pairs: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__(inner)
        self.pairs = pairs

    def wait(self, timeout: timedelta | None = None) -> bool:
        done = super().wait(timeout)
        for output, result in self.pairs:
            output.copy_(result)
        return done


@breaks("work/completed-is-written", says=r"outputs at that moment: rank 0 is wrong")
@breaks("reduce_scatter/completed-is-written", says=r"outputs at that moment: rank 0 is wrong")
@breaks("work/dropped-handles", says=r"rank \d is wrong")
@breaks("reduce_scatter_tensor/dropped-handles", says=r"rank \d is wrong")
class FillsOutputsAtWait(AroundImpl):
    """Results are in tensors of the group's own until somebody waits."""

    def around(self, right: Callable[..., Any], taken: Any, *rest: Any) -> Any:
        results = mapped(Tensor.clone, taken)
        pairs = list(zip(all_of(taken), all_of(results), strict=True))
        return _CopiesAtWait(right(results, *rest), pairs)


class _BeginsAtWait(Relayed):
    def __init__(self, begin: Callable[[], Any]) -> None:
        super().__init__(None)
        self.begin = begin

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.inner = self.inner or self.begin()
        return super().wait(timeout)

    def is_completed(self) -> bool:
        return self.inner is not None and super().is_completed()


@breaks("barrier/entered-when-issued", says=r"whether the others have passed: rank 0 is wrong")
class EntersWhenWaitedFor(ForwardingGroup):
    """An asynchronous barrier is a promise to enter it."""

    def barrier(self, opts: Any) -> Any:
        right = super().barrier
        return _BeginsAtWait(lambda: right(opts)) if opts.asyncOp else right(opts)


@breaks("order/threads-of-several-groups", says=r"(all_reduce|broadcast).*: rank \d is wrong")
class OneCollectiveAtATime(ForwardingGroup):
    """A lock of all groups is held for as long as a collective lasts."""

    lock: ClassVar[threading.Lock] = threading.Lock()

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        with self.lock:
            work = super().allreduce(tensors, opts)
            work.wait()
            return work


@breaks("all_reduce_coalesced/many", says=r"rank 0 is wrong")
@breaks("coalescing/many", says=r"rank 0 is wrong")
class TakesSixteenAtMost(ForwardingGroup):
    """What lies behind the sixteenth tensor of a list is forgotten."""

    def allreduce_coalesced(self, tensors: Any, opts: Any) -> Any:
        return super().allreduce_coalesced(tensors[:16], opts)
