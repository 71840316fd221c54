"""Mutants of conformance/spec/faults/changed_timeouts.py."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from conformance.verdict import Verdict
from impl.gloo import ProcessGroupGloo
from tests.mutants.faults.kit import WaitsFor
from tests.mutants.kit import ForwardingGroup, GroupMutant, breaks


@breaks("timeouts/changed", says=r"all_reduce", verdict=Verdict.TIMEOUT)
class SetTimeoutDoesNothing(ForwardingGroup):
    """set_timeout has no effect."""

    def set_timeout(self, timeout: timedelta) -> None:
        return


@breaks("timeouts/lengthened-for-messages", says=r"rank 0 is wrong\nat \[0\]")
class MessagesHaveTwoSeconds(GroupMutant, ProcessGroupGloo):
    """Whatever the timeout of the group, a message has two seconds at most."""

    base = "impl"

    def recv(self, tensors: Any, src: int, tag: int) -> Any:
        return WaitsFor(super().recv(tensors, src, tag), timedelta(seconds=2))


class _KnowsItsFirstTimeout(ForwardingGroup):
    """Its timeout can be changed; a mutant remembers the one that it was made with."""

    def __init__(self, store: Any, rank: int, world_size: int, timeout: timedelta) -> None:
        super().__init__(store, rank, world_size, timeout)
        self.first = timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self.inner.set_timeout(timeout)


@breaks("timeouts/shortened-for-messages", says=r"recv", verdict=Verdict.TIMEOUT)
class MessagesKeepTheFirstTimeout(_KnowsItsFirstTimeout):
    """set_timeout is for collectives alone."""

    def recv(self, tensors: Any, src: int, tag: int) -> Any:
        return WaitsFor(super().recv(tensors, src, tag), self.first)


@breaks("timeouts/changed", says=r"how=wait", verdict=Verdict.TIMEOUT)
class ANewTimeoutIsForBlockingCalls(_KnowsItsFirstTimeout):
    """An operation that is waited for later has the timeout that the group was made with."""

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        if opts.asyncOp:
            opts.timeout = self.first
        return super().allreduce(tensors, opts)


@breaks("timeouts/changed", says=r"where=default", verdict=Verdict.TIMEOUT)
class TheDefaultTimeoutStays(_KnowsItsFirstTimeout):
    """The timeout of the default group is that of init_process_group for good."""

    def set_timeout(self, timeout: timedelta) -> None:
        if dist.group.WORLD is not self:
            super().set_timeout(timeout)


@breaks("timeouts/changed", says=r"rank 0 is wrong\nat \[0\]: got str .raised RuntimeError")
class TimeoutsOnlyShrink(_KnowsItsFirstTimeout):
    """set_timeout cannot lengthen the timeout that a group was made with."""

    def set_timeout(self, timeout: timedelta) -> None:
        super().set_timeout(min(timeout, self.first))


@breaks("timeouts/changed", says=r"all_gather", verdict=Verdict.TIMEOUT)
class ANewTimeoutIsForReductions(_KnowsItsFirstTimeout):
    """Operations other than reductions have the timeout that the group was made with."""

    def forward(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if "reduce" not in method and hasattr(args[-1], "timeout"):
            args[-1].timeout = self.first
        return super().forward(method, *args, **kwargs)
