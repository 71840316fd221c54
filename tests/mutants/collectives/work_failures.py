"""Mutants of conformance/spec/collectives/work_failures.py."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch

from conformance.power.handles import Relayed
from conformance.verdict import Verdict
from tests.mutants.collectives.kit import OfOne, Relaying
from tests.mutants.kit import breaks
from tests.mutants.p2p.kit import Messages


@breaks("work/wait-after-timeout", says=r"second wait for all_reduce of 2 ranks ended with")
class CannotBeWaitedForAfterATimeout(Relaying):
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


@breaks("work/wait-timeout", says=r"wait for all_reduce of 2 ranks ended with 'returned'")
class WaitReturnsAtItsTimeout(Relaying):
    class handle(Relayed):  # noqa: N801
        def wait(self, timeout: timedelta | None = None) -> bool:
            try:
                return super().wait(timeout)
            except RuntimeError:
                return False


@breaks("work/failure-is-told", says=r"all_reduce of 2 ranks failed, and exception is None")
class NeverHasAnException(Relaying):
    class handle(Relayed):  # noqa: N801
        def exception(self) -> Any:
            return None


@breaks("work/failed-future", says=r"all_reduce of 2 ranks failed, and its future is not done")
class FuturesOfFailuresNeverEnd(Relaying):
    class handle(Relayed):  # noqa: N801
        def get_future(self) -> Any:
            future: torch.futures.Future[Any] = torch.futures.Future()

            def pass_on(done: torch.futures.Future[Any]) -> None:
                with suppress(RuntimeError):
                    future.set_result(done.value())

            super().get_future().add_done_callback(pass_on)
            return future


@breaks("work/group-timeout", says=r"wait for all_reduce of 2 ranks ended with 'returned'")
@breaks("work/peer-gone", says=r"wait ended well without the last rank")
class WaitHidesFailures(Relaying):
    class handle(Relayed):  # noqa: N801
        def wait(self, timeout: timedelta | None = None) -> bool:
            try:
                return super().wait(timeout)
            except RuntimeError:
                return True


@breaks("work/wait-timeout", says=r"wait for scatter of 2 ranks ended with 'returned'")
class TheWaitForAScatterReturnsAtItsTimeout(OfOne):
    method = "scatter"
    handle = WaitReturnsAtItsTimeout.handle


class _Patient(Relayed):
    """The timeout of a wait has no effect."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return super().wait()


@breaks("work/wait-timeout", says=r"kind=barrier\n[\s\S]*rank 0 ", verdict=Verdict.TIMEOUT)
class TheWaitForABarrierHasNoTimeout(OfOne):
    method = "barrier"
    handle = _Patient


class _Impatient(Relayed):
    """No wait takes longer than a little, whatever its timeout."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return super().wait(min(timeout or timedelta(minutes=5), timedelta(milliseconds=5)))


@breaks(
    "work/wait-timeout",
    says=r"waited for up to a minute: rank 0 is wrong|raised .*timed out",
)
class TheWaitForAReduceIsCutShort(OfOne):
    method = "reduce"
    handle = _Impatient


@breaks(
    "work/wait-after-timeout",
    says=r"second wait for broadcast of 2 ranks ended with '.*[Tt]imed out",
)
class ABroadcastIsLostAfterATimeout(OfOne):
    method = "broadcast"
    handle = CannotBeWaitedForAfterATimeout.handle


@breaks("work/group-timeout", says=r"wait for all_to_all of 2 ranks ended with 'returned'")
class TheWaitForAnExchangeHidesFailures(OfOne):
    method = "alltoall"
    handle = WaitHidesFailures.handle


@breaks("work/failure-is-told", says=r"all_gather of 2 ranks failed, and exception is None")
class AllGatherNeverHasAnException(OfOne):
    method = "allgather"
    handle = NeverHasAnException.handle


class _AlwaysSucceeds(Relayed):
    def is_success(self) -> bool:
        return True


@breaks("work/failure-is-told", says=r"barrier of 2 ranks failed, and is_success is true")
class BarriersAlwaysSucceed(OfOne):
    method = "barrier"
    handle = _AlwaysSucceeds


@breaks("work/failed-future", says=r"gather of 2 ranks failed, and its future is not done")
class TheFutureOfAFailedGatherNeverEnds(OfOne):
    method = "gather"
    handle = FuturesOfFailuresNeverEnd.handle


@breaks("work/failed-future", says=r"before and after: rank 0 is wrong\nat \[0\]")
class FuturesOfFailedReceivesSucceed(Messages):
    """The future of a receive ends well, however the receive ends."""

    class handle(Relayed):  # noqa: N801
        def get_future(self) -> Any:
            future: torch.futures.Future[Any] = torch.futures.Future()

            def pass_on(done: torch.futures.Future[Any]) -> None:
                with suppress(Exception):
                    done.wait()
                future.set_result([])

            super().get_future().add_done_callback(pass_on)
            return future
