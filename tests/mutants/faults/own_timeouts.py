"""Mutants of conformance/spec/faults/own_timeouts.py."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from conformance.verdict import Verdict
from tests.mutants.kit import ForwardingGroup, breaks


@breaks("timeouts/of-a-call", says=r"rank 0 went on after|deadline", verdict=Verdict.TIMEOUT)
class GathersHaveTheTimeoutOfTheGroup(ForwardingGroup):
    """A gather ignores the timeout in its options."""

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        opts.timeout = timedelta(minutes=5)
        return super().gather(outputs, inputs, opts)


@breaks("timeouts/of-a-call", says=r"keys \['scatter'\]|gave up after 0\.\d+ s of 0\.5 s")
class ScattersTakeSecondsForTenths(ForwardingGroup):
    """A scatter has a tenth of the timeout in its options."""

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        opts.timeout /= 10
        return super().scatter(outputs, inputs, opts)


@breaks("timeouts/of-a-call", says=r"keys \['reduce'\]")
class NoReduceWaitsLongerThanItsGroup(ForwardingGroup):
    """The timeout of a reduce is cut to that of its group."""

    def __init__(self, store: Any, rank: int, world_size: int, timeout: timedelta) -> None:
        super().__init__(store, rank, world_size, timeout)
        self.longest = timeout

    def reduce(self, tensors: Any, opts: Any) -> Any:
        opts.timeout = min(opts.timeout, self.longest)
        return super().reduce(tensors, opts)
