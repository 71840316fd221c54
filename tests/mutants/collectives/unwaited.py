"""Mutants of conformance/spec/collectives/unwaited.py."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch import Tensor

from conformance.power.handles import Relayed
from tests.mutants.collectives.kit import AroundImpl, all_of, mapped
from tests.mutants.kit import ForwardingGroup, breaks


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
    """Results are in tensors of the group's own until wait is called."""

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
class EntersABarrierWhenWaitedFor(ForwardingGroup):
    """An asynchronous barrier is entered only when its handle is waited for."""

    def barrier(self, opts: Any) -> Any:
        right = super().barrier
        return _BeginsAtWait(lambda: right(opts)) if opts.asyncOp else right(opts)
