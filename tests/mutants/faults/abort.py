"""Mutants of conformance/spec/faults/abort.py."""

from __future__ import annotations

from typing import Any, ClassVar

from conformance.verdict import Verdict
from impl.gloo import ProcessGroupGloo
from tests.mutants.kit import GroupMutant, breaks


@breaks("abort/ends-what-waits", says=r"abort_what_waits", verdict=Verdict.TIMEOUT)
class AbortDoesNothing(GroupMutant, ProcessGroupGloo):
    base = "impl"

    def abort(self) -> None:
        return


@breaks("abort/ends-the-group", says=r"RuntimeError: all are aborted")
class AbortsEverything(GroupMutant, ProcessGroupGloo):
    """An abort ends all groups of the process."""

    base = "impl"
    is_aborted: ClassVar[bool] = False

    def abort(self) -> None:
        type(self).is_aborted = True
        super().abort()

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        if self.is_aborted:
            raise RuntimeError("all are aborted")
        return super().allreduce(tensors, opts)
