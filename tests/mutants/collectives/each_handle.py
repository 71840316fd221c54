"""Mutants of conformance/spec/collectives/each_handle.py."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from conformance.power.handles import Relayed
from conformance.verdict import Verdict
from tests.mutants.collectives.kit import Relaying
from tests.mutants.kit import breaks


@breaks("reduce_scatter/wait-timeout", says=r"rank 0 .* at the deadline", verdict=Verdict.TIMEOUT)
class WaitsHaveNoTimeout(Relaying):
    """The timeout of a wait has no effect, as that of a reduce_scatter in torch."""

    class handle(Relayed):  # noqa: N801  # the attribute that it overrides
        def wait(self, timeout: timedelta | None = None) -> bool:
            return super().wait()


@breaks(
    "reduce_scatter/wait-timeout",
    says=r"wait for reduce_scatter_tensor of 2 ranks ended with 'returned'",
)
class TheWaitForOneScatterReturnsAtItsTimeout(Relaying):
    """That of reduce_scatter_tensor, which fills one tensor."""

    def around(self, right: Any, taken: Any, *rest: Any) -> Any:
        work = right(taken, *rest)
        fills_one = right.func.__name__ in ("reduce_scatter_single", "_reduce_scatter_base")
        return _Forgiving(work) if fills_one else work


class _Forgiving(Relayed):
    def wait(self, timeout: timedelta | None = None) -> bool:
        try:
            return super().wait(timeout)
        except RuntimeError:
            return False


@breaks(
    "reduce_scatter/failure-is-told",
    says=r"reduce_scatter of 2 ranks failed, and is_success is true",
)
class FailuresAreSuccesses(Relaying):
    """is_success is true, and exception None, as of a reduce_scatter in torch."""

    class handle(Relayed):  # noqa: N801
        def is_success(self) -> bool:
            return True

        def exception(self) -> Any:
            return None
