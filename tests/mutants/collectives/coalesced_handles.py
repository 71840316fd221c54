"""Mutants of conformance/spec/collectives/coalesced_handles.py."""

from __future__ import annotations

from typing import Any

from conformance.power.handles import Done, NeverCompleted
from conformance.verdict import Verdict
from tests.mutants.kit import ForwardingGroup, breaks


@breaks("coalescing/in-turns", says=r"rank 0  after all_reduce", verdict=Verdict.TIMEOUT)
class WaitsInCoalescedCalls(ForwardingGroup):
    """all_reduce of several tensors returns when it is done."""

    def allreduce_coalesced(self, tensors: Any, opts: Any) -> Any:
        work = super().allreduce_coalesced(tensors, opts)
        work.wait()
        return work


@breaks("coalescing/in-turns", says=r"rank \d is wrong\nat \[2\]\[0\]")
class LosesTheThirdCoalescedScatter(ForwardingGroup):
    calls = 0

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        self.calls += 1
        if self.calls == 3:
            return Done()
        return super().reduce_scatter_single_coalesced(outputs, inputs, opts)


@breaks("coalescing/completes-unwaited", says="it is never complete")
class CoalescedGathersAreNeverCompleted(ForwardingGroup):
    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, *rest: Any) -> Any:
        return NeverCompleted(super().all_gather_single_coalesced(outputs, inputs, *rest))
